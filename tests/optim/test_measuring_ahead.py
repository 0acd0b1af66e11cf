"""What is measured right after a step for the next one is used if and only if the weights are the same then.

Without a GPU: in place of a CUDA graph on a second stream there is one that measures when it is started.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pathsgd import PathMuon, PathSGD, trace
from pathsgd.optim import gamma_cache
from pathsgd.optim.relative import steps
from support.measure_again import MeasureAgain, capture_on_cpu


@pytest.fixture(autouse=True)
def captured_on_cpu(monkeypatch):
    capture_on_cpu(monkeypatch)
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


def run_again(model, optimizer):
    """A forward pass, which writes running statistics."""
    with torch.no_grad():
        model(torch.linspace(-1, 2, 12).view(2, 6).to(model[0].weight))


def run_without_counting(model, optimizer):
    if isinstance(model[1], nn.BatchNorm1d):
        x = torch.linspace(-1, 2, 32).view(2, 16).to(model[0].weight)
        F.batch_norm(x, model[1].running_mean, model[1].running_var, training=True)
        optimizer.refresh()


def add_up(model, optimizer):
    """A second batch, whose gradients are added."""
    model(torch.linspace(-1, 2, 12).view(2, 6).to(model[0].weight)).square().sum().backward()


EVENTS = (nothing, write_weights, write_behind_torch, replace_storage, look, validate, skip)
LATE = (write_weights, write_behind_torch, look, run_again, run_without_counting, add_up)
"""Between the backward pass and the step."""
OPTIMIZERS = {
    "PathMuon": PathMuon,
    "PathSGD": lambda m, x: PathSGD(m, x, lr=1e-2, implementation="reference"),
    "kernel": lambda m, x: PathSGD(m, x, lr=1e-2, momentum=0.5, implementation="triton"),
}


class Uncounted(nn.BatchNorm1d):
    """As somebody may write it: nothing says that its statistics were written."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


def build(norm, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)


@functools.cache
def traced(norm):
    return trace(build(norm), torch.ones(2, 6, dtype=torch.float64))


def train(name, norm, early=nothing, late=nothing):
    dtype = torch.float32 if name == "kernel" else torch.float64
    model, x = build(norm, dtype), torch.randn(8, 6, dtype=torch.float64).to(dtype)
    optimizer = OPTIMIZERS[name](model, traced(norm))
    for k in range(10):
        if k == 7:
            early(model, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(model(x * (1 + k)), torch.arange(8) % 3).backward()
        if k >= 7:
            late(model, optimizer)
        optimizer.step()
    if name == "kernel" and norm is not nn.Identity:  # else it is a chain of linear layers
        assert set(optimizer.implementations.values()) == {"triton"}
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def check(name, norm, monkeypatch, **events):
    found = train(name, norm, **events)
    used = MeasureAgain.used
    monkeypatch.setattr(gamma_cache.GammaCache, "_measure_ahead", lambda *_, **__: None)
    monkeypatch.setattr(gamma_cache, "_are_on_gpu", lambda tensors: False)
    assert torch.equal(found, train(name, norm, **events))
    return used


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", ["PathMuon", "PathSGD"])
def test_never_stale(name, event, norm, monkeypatch):
    assert check(name, norm, monkeypatch, early=event)


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d])
@pytest.mark.parametrize("event", LATE)
def test_never_stale_between_the_backward_pass_and_the_step(event, norm, monkeypatch):
    """gamma with running statistics is measured beside the backward pass."""
    assert check("PathSGD", norm, monkeypatch, late=event)


@pytest.mark.parametrize(
    "events", [{}, {"early": write_weights}, {"late": run_again}], ids=["none", "early", "late"]
)
def test_never_stale_in_the_kernel(events, monkeypatch):
    assert check("kernel", nn.BatchNorm1d, monkeypatch, **events)


def test_statistics_that_nothing_counts_are_not_measured_ahead(monkeypatch):
    assert not check("PathSGD", Uncounted, monkeypatch, late=run_again)


def test_a_backward_pass_of_each_batch_measures_once(monkeypatch):
    """Where gradients of several batches are added up, only the last one begins to measure."""
    measured, replay = [], MeasureAgain.replay
    monkeypatch.setattr(
        MeasureAgain, "replay", lambda self, check=False: (measured.append(1), replay(self))[1]
    )
    model, x = build(nn.BatchNorm1d), torch.randn(8, 6, dtype=torch.float64)
    optimizer = OPTIMIZERS["PathSGD"](model, traced(nn.BatchNorm1d))
    counts = []
    for k in range(9):
        optimizer.zero_grad()
        for part in x.split(4):
            F.cross_entropy(model(part * (1 + k)), torch.arange(4) % 3).backward()
        counts.append(len(measured))
        optimizer.step()
    assert [after - before for before, after in pairwise(counts)][-4:] == [1] * 4
    assert len(measured) == counts[-1]  # in the backward pass, not in the step


def look_at_the_loss(model, optimizer):
    x = torch.ones(2, 6, dtype=torch.float64)
    with torch.no_grad():
        optimizer.compiled(x)
    optimizer.compiled.eval()(x)
    optimizer.compiled.train()


@pytest.mark.parametrize("late", [nothing, write_weights, run_again, add_up, look_at_the_loss])
def test_a_compiled_network_measures_when_it_has_run(late, monkeypatch):
    """Its gradients are known at the end of the backward pass only."""
    order, start = [], MeasureAgain.start

    def train():
        torch.manual_seed(0)
        model, x = build(nn.BatchNorm1d), torch.randn(8, 6, dtype=torch.float64)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        optimizer = PathSGD(compiled, traced(nn.BatchNorm1d), lr=1e-2, implementation="reference")
        optimizer.compiled = compiled
        for k in range(8):
            optimizer.zero_grad()
            loss = F.cross_entropy(compiled(x * (1 + k)), torch.arange(8) % 3)
            order.append("run")
            loss.backward()
            late(model, optimizer)
            order.append("step")
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    monkeypatch.setattr(
        MeasureAgain, "start", lambda self, check=False: (order.append("measure"), start(self))[1]
    )
    found = train()
    if late is nothing:
        assert order[-3:] == ["measure", "run", "step"]
        assert MeasureAgain.used
    monkeypatch.setattr(gamma_cache, "_are_on_gpu", lambda tensors: False)
    assert torch.equal(found, train())


def test_watching_backward_passes_keeps_nothing_alive():
    model, x = build(nn.BatchNorm1d), torch.randn(8, 6, dtype=torch.float64)
    compiled = torch.compile(model, backend="eager")
    optimizer = OPTIMIZERS["PathSGD"](compiled, traced(nn.BatchNorm1d))
    for _ in range(6):
        model(x).square().sum().backward()
        optimizer.step()
    cache = weakref.ref(optimizer.gamma_cache)
    copied = pickle.loads(pickle.dumps(model))
    del optimizer
    gc.collect()
    assert cache() is None
    assert not compiled._forward_hooks
    for own in (model, copied, copy.deepcopy(model)):
        own(x).square().sum().backward()
