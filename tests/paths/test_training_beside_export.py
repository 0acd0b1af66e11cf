"""A model trained while another thread traces ends at the same weights as alone, to the last bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import BalancedMuon, PathNormalized, PathSGD
from support.beside import Beside
from support.old_torch import needs_torch

pytestmark = pytest.mark.filterwarnings("ignore:.*share a path with the matrix:UserWarning")
"""Paths of a step end at batch norms, so of a ResNet's few are left, and a warning says so."""

MODELS = {
    "stack": lambda: nn.Sequential(
        nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)
    ),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4)
    ),
}
OPTIMIZERS = {
    "PathSGD": lambda model, x: PathSGD(model, x, lr=1e-2, momentum=0.9),
    "Adam": lambda model, x: PathNormalized(torch.optim.Adam, model, x, lr=1e-2),
    "BalancedMuon": BalancedMuon,
}
STEPS = 25


def train(model, make, graph=None):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 16, generator=generator), torch.arange(32) % 4
    x = x.reshape(32, 1, 4, 4) if isinstance(model[0], nn.Conv2d) else x
    optimizer = make(model, x[:1] if graph is None else graph)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def other_model():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))


@pytest.mark.parametrize(
    "optimizer",
    [
        "PathSGD",
        pytest.param("Adam", marks=needs_torch(2, 7, "export seen by its own thread alone")),
        "BalancedMuon",
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_beside_a_trace(model, optimizer):
    start = MODELS[model]()
    alone = train(copy.deepcopy(start), OPTIMIZERS[optimizer])
    with Beside(lambda: pathsgd.trace(other_model(), torch.zeros(1, 1, 4, 4))) as beside:
        found = train(copy.deepcopy(start), OPTIMIZERS[optimizer])
    assert beside.rounds > 0
    assert all(map(torch.equal, found, alone))


@pytest.mark.filterwarnings("ignore")
def test_beside_an_export_of_the_user():
    """torch's own export turns backends off for the whole process, so rounding may differ, but no gamma is
    stale: with the check that was fooled by it the largest difference was 6."""
    start = MODELS["stack"]()
    graph = pathsgd.trace(start)
    alone = train(copy.deepcopy(start), OPTIMIZERS["PathSGD"], graph)
    with Beside(lambda: torch.export.export(other_model(), (torch.zeros(2, 1, 4, 4),))) as beside:
        found = train(copy.deepcopy(start), OPTIMIZERS["PathSGD"], graph)
    assert beside.rounds > 0
    for a, b in zip(found, alone, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
