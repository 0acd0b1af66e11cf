"""What is measured right after a step for the next one is used if and only if the weights are the same then.

Without a GPU: in place of a CUDA graph on a second stream there is one that measures when it is started.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pathsgd import PathMuon, PathSGD, trace
from pathsgd.geometry.passes import powered_network
from pathsgd.optim import gamma_cache
from pathsgd.optim.relative import steps


class MeasureAgain:
    used = 0

    def __init__(self, graph, tensors, p, measure):
        self.network = lambda: powered_network(graph, tensors, p)
        self.measure, self.tensors, self.ahead = measure, tensors, None

    def fits(self, tensors):
        return all(tensors[name] is tensor for name, tensor in self.tensors.items())

    @torch.no_grad()
    def replay(self):
        return self.measure(self.network(), None)

    def start(self):
        self.ahead = self.replay()

    def finish(self):
        MeasureAgain.used += 1
        return self.ahead


@pytest.fixture(autouse=True)
def captured_on_cpu(monkeypatch):
    monkeypatch.setattr(gamma_cache, "CapturedMeasurement", MeasureAgain)
    monkeypatch.setattr(gamma_cache, "_are_on_gpu", lambda tensors: True)
    monkeypatch.setattr(steps, "is_capturable", lambda *_: False)
    monkeypatch.setattr(MeasureAgain, "used", 0)


def nothing(model, optimizer):
    pass


@torch.no_grad()
def write_weights(model, optimizer):
    model[0].weight.mul_(torch.linspace(1, 3, 16)[:, None])


def write_behind_torch(model, optimizer):
    model[0].weight.data.mul_(torch.linspace(1, 3, 16)[:, None])
    optimizer.refresh()


def replace_storage(model, optimizer):
    model[3].weight.data = 2 * model[3].weight.detach()


def look(model, optimizer):
    optimizer.gamma_cache.gammas(2.0)


def validate(model, optimizer):
    model.eval()(torch.ones(2, 6, dtype=torch.float64))
    model.train()


def skip(model, optimizer):
    """As a GradScaler does."""
    optimizer.zero_grad()
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()


EVENTS = (nothing, write_weights, write_behind_torch, replace_storage, look, validate, skip)
OPTIMIZERS = {
    "PathMuon": PathMuon,
    "PathSGD": lambda m, x: PathSGD(m, x, lr=1e-2, implementation="reference"),
}


def build(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Linear(16, 3)).double()


@functools.cache
def traced(norm):
    return trace(build(norm), torch.ones(2, 6, dtype=torch.float64))


def train(make, event, norm):
    model, x = build(norm), torch.randn(8, 6, dtype=torch.float64)
    optimizer = make(model, traced(norm))
    for k in range(10):
        if k == 7:
            event(model, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(model(x * (1 + k)), torch.arange(8) % 3).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_never_stale(name, event, norm, monkeypatch):
    found = train(OPTIMIZERS[name], event, norm)
    # Running statistics are written between two steps, so gamma with them cannot be measured ahead.
    assert bool(MeasureAgain.used) == (name != "PathSGD" or norm is nn.Identity)
    monkeypatch.setattr(gamma_cache.GammaCache, "_measure_ahead", lambda self: None)
    monkeypatch.setattr(gamma_cache, "_are_on_gpu", lambda tensors: False)
    assert torch.equal(found, train(OPTIMIZERS[name], event, norm))
