"""A resumed training is the uninterrupted one to the last bit, whatever moves the parameters."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from pathsgd import BalancedMuon, PathNormalized, PathSGD
from pathsgd.graph.export import tensors_in
from support.cases import CASES, traced
from support.cases import build as build_case
from support.stacks import stack
from support.training import model_of

pytestmark = pytest.mark.filterwarnings("ignore:.*share a path with the matrix:UserWarning")
"""Paths of a step end at batch norms, so of a ResNet's few are left, and a warning says so."""

OPTIMIZERS = {
    "PathSGD": lambda m, g: PathSGD(m, g, lr=1e-4),
    "momentum": lambda m, g: PathSGD(m, g, lr=1e-4, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda m, g: PathNormalized(torch.optim.Adagrad, m, g, lr=1e-3),
    "AdamW": lambda m, g: PathNormalized(torch.optim.AdamW, m, g, lr=1e-3),
    "BalancedMuon": BalancedMuon,
}


def run(model, optimizer, x, steps):
    torch.manual_seed(1)  # of dropout
    for step in range(steps):
        optimizer.zero_grad()
        sum(y.square().mean() for y in tensors_in(model(x * (1 + step)))).backward()
        optimizer.step()


def check_resumed(model, make, x, steps=2):
    """Copies, pickles and loads the optimizer in mid-training; all go on as it does itself."""
    fresh = copy.deepcopy(model)
    optimizer = make(model)
    run(model, optimizer, x, steps)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file)
    fresh.load_state_dict(weights)
    loaded = make(fresh)
    loaded.load_state_dict(state)
    copied, pickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    run(model, optimizer, x, steps)
    for how, other in {"loaded": loaded, "copied": copied, "pickled": pickled}.items():
        its_model = model_of(other)
        run(its_model, other, x, steps)
        for (name, p), expected in zip(its_model.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p, expected), (how, name)


@pytest.mark.parametrize("foreign", ["SGD", "AdamW", *OPTIMIZERS])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_another_optimizer_is_refused(name, foreign):
    model = stack(6, 4, 2)
    plain = getattr(torch.optim, foreign, None)  # of the base of a PathNormalized it is taken
    other = plain(model.parameters()) if plain else OPTIMIZERS[foreign](model, None)
    optimizer = OPTIMIZERS[name](model, None)
    lr = optimizer.param_groups[0]["lr"]
    if foreign == name or {name, foreign} == {"PathSGD", "momentum"}:
        optimizer.load_state_dict(other.state_dict())
    else:
        with pytest.raises(ValueError, match="state of another optimizer"):
            optimizer.load_state_dict(other.state_dict())
        assert optimizer.param_groups[0]["lr"] == lr


@pytest.mark.parametrize("name", ["momentum", "AdamW", "BalancedMuon"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_case(case, name):
    model = build_case(case)
    check_resumed(model, lambda m: OPTIMIZERS[name](m, traced(case)), model.example())


@pytest.mark.parametrize("name", ["PathSGD", "momentum"])
@pytest.mark.parametrize("widths", [(20, 70, 33, 5), (20, 70, 60, 50, 5)], ids=str)
def test_blocks_of_linear_layers(widths, name, monkeypatch):
    monkeypatch.setattr("pathsgd.paths.blocked.BLOCK", 500)  # so that a layer has several
    check_resumed(stack(*widths), lambda m: OPTIMIZERS[name](m, None), torch.randn(16, widths[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["PathSGD", "momentum"])
@pytest.mark.parametrize("widths", [(784, 4000, 4000, 10), (300, 700, 600, 500, 400, 10)], ids=str)
def test_linear_layers_on_a_gpu(widths, name):
    """Five steps and more: the last ones are replayed from CUDA graphs."""
    x, model = torch.randn(16, widths[0], device="cuda"), stack(*widths).cuda()
    check_resumed(model, lambda m: OPTIMIZERS[name](m, None), x, steps=5)
