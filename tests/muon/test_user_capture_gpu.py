"""A user's CUDA graph of whole training steps: of one step or two, and of several models."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pathsgd import BalancedMuon
from pathsgd.muon.round import EVERY
from support.networks import Mlp, SmallResNet, Transformer, Vgg, build

pytestmark = pytest.mark.gpu

WARM_UP, STEPS = 3, 2 * EVERY + 2


class Unbalanced(Mlp):
    """Its weights are near the ends of the range of floats."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            for tensor, factor in ((self[0].weight, 70), (self[0].bias, 70), (self[2].weight, -70)):
                tensor.mul_(2.0**factor)


def once(model, x, optimizer):
    optimizer.zero_grad()
    y = model(x)
    F.cross_entropy(y.flatten(1), torch.arange(len(y), device="cuda")).backward()
    optimizer.step()


def twice(model, x, optimizer):
    once(model, x, optimizer)
    once(model, x, optimizer)


def make(network):
    model, x = build(network, torch.float32)
    model, x = model.cuda(), x.cuda()
    return model, x, BalancedMuon(model, x, lr=torch.tensor(0.01, device="cuda"))


# Else cudnn chooses by time, and not the same twice: Newton-Schulz magnifies rounding.
@torch.backends.cudnn.flags(enabled=True, deterministic=True)
def train(kinds, run, captured):
    """The weights of models that are trained together, after a warm-up in one graph or without any."""
    trained = [make(kind) for kind in kinds]

    def run_all(run):
        for each in trained:
            run(*each)

    runs = STEPS // 2 if run is twice else STEPS
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run_all(once)
        for _ in range(0 if captured else runs):
            run_all(run)
    torch.cuda.current_stream().wait_stream(stream)
    if captured:
        for *_, optimizer in trained:
            optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run_all(run)
        for _ in range(runs):
            graph.replay()
    torch.cuda.synchronize()
    return [p.detach() for model, *_ in trained for p in model.parameters()]


def check(kinds, run):
    weights, expected = (train(kinds, run, captured) for captured in (True, False))
    for p, q in zip(weights, expected, strict=True):
        assert torch.isfinite(p).all()
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4 * q.abs().max().item())


@pytest.mark.parametrize("run", [once, twice])
@pytest.mark.parametrize("network", [Mlp, Vgg, SmallResNet, Transformer, Unbalanced])
def test_the_same_weights(network, run):
    """Over several rounds of balancing, which replays count on the device."""
    check([network], run)


def test_several_models_in_one_graph():
    """The launches of one do not lie in memory that those of another are still using."""
    check([Transformer, Mlp, Transformer], once)
