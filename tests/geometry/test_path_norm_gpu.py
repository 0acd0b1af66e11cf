"""path_norm replayed from a CUDA graph is that of the eager call in all bits: ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch

import pathsgd
from benchmarks.networks import GPT, small_image_resnet
from pathsgd.training import capture
from support.networks import Mlp, build

pytestmark = pytest.mark.gpu


def mlp():
    model, x = build(Mlp, torch.float32)
    return model.cuda(), x.cuda(), {}


def resnet():
    torch.manual_seed(0)
    model, x = small_image_resnet().cuda(), torch.randn(4, 3, 32, 32, device="cuda")
    with torch.no_grad():
        model(x)
    return model.eval(), x, {}


def gpt():
    torch.manual_seed(0)
    model = GPT(tokens=100, width=64, heads=4, blocks=2, context=32).cuda()
    return model, torch.zeros(1, 32, dtype=torch.int64, device="cuda"), {"region": 1}


def measure_eagerly(model, graph, **options):
    with capture._lock:
        return pathsgd.path_norm(model, graph, **options).clone()


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"log": True}, {"p": 1.5}])
@pytest.mark.parametrize("kind", [mlp, resnet, gpt])
def test_the_same_bits_while_weights_are_written(kind, options):
    model, x, region = kind()
    options = {**options, **region}
    graph = pathsgd.trace(model, x)
    for k in range(capture.WARM_UP + 4):
        assert torch.equal(
            pathsgd.path_norm(model, graph, **options), measure_eagerly(model, graph, **options)
        )
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01 * (k + 1))
    (calls,) = capture._calls[graph].values()
    assert calls.captured is not None


@torch.no_grad()
def test_a_tensor_that_moves_is_looked_for_again():
    model, x, _ = mlp()
    graph = pathsgd.trace(model, x)
    for _ in range(capture.WARM_UP + 2):
        pathsgd.path_norm(model, graph)
    model[0].weight.data = 2 * model[0].weight.data
    assert torch.equal(pathsgd.path_norm(model, graph), measure_eagerly(model, graph))


@torch.no_grad()
def test_a_replay_checks_the_range():
    model, x, _ = mlp()
    model = model.double()
    graph = pathsgd.trace(model, x.double())
    for _ in range(capture.WARM_UP + 2):
        pathsgd.path_norm(model, graph)
    model[0].weight[0] *= 1e-200
    with pytest.raises(pathsgd.PathError, match="more than fp64 can hold"):
        pathsgd.path_norm(model, graph)
