"""When steps look at the range of their numbers, and that nothing is wrong in between."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pathsgd import PathAdam, PathMuon, PathSGD, trace
from pathsgd.geometry import range_check
from pathsgd.geometry.range_check import CHECK_EVERY
from pathsgd.optim import gamma_cache
from pathsgd.optim.parameter_writes import USUAL
from support.measure_again import MeasureAgain, capture_on_cpu

OPTIMIZERS = {
    "PathMuon": PathMuon,
    "PathAdam": PathAdam,
    "PathSGD": lambda model, x: PathSGD(model, x, lr=1e-3, implementation="reference"),
}


@pytest.fixture
def checks(monkeypatch):
    """How many there have been, as of sharded parameters on a GPU, whose steps are not captured."""
    monkeypatch.setattr(gamma_cache, "_are_on_gpu", lambda tensors: True)
    monkeypatch.setattr(gamma_cache, "is_sharded", lambda tensor: True)
    made, begin = [], range_check.RangeCheck.__post_init__
    monkeypatch.setattr(range_check.RangeCheck, "__post_init__", lambda own: (made.append(1), begin(own))[1])
    return made


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def train(model, optimizer, steps):
    x = torch.linspace(-1, 1, 48).reshape(8, 6)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(8) % 3).backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_at_first_every_step_then_now_and_then(name, checks):
    model = build()
    optimizer = OPTIMIZERS[name](model, trace(model))
    checks.clear()
    train(model, optimizer, 3 * CHECK_EVERY)
    assert len(checks) == CHECK_EVERY + 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_that_something_else_wrote_are_checked_at_once(name, checks):
    """A rescaling that leaves the range of plain floats, after many steps that did not."""
    model = build()
    optimizer = OPTIMIZERS[name](model, trace(model))
    train(model, optimizer, CHECK_EVERY + 3)
    same, its_optimizer = copy.deepcopy((model, optimizer))
    train(same, its_optimizer, 1)
    checked = len(checks)
    with torch.no_grad():
        for layer, factor in ((model[0], 2.0**70), (model[2], 2.0**-70)):
            layer.weight.mul_(factor)
        model[0].bias.mul_(2.0**70)
    train(model, optimizer, 1)
    assert len(checks) == checked + 1
    x = torch.linspace(-1, 1, 48).reshape(8, 6)
    torch.testing.assert_close(model(x), same(x), rtol=1e-4, atol=1e-5)


def test_writes_before_two_steps_in_a_row_are_checked_too(checks):
    model = build()
    optimizer = PathMuon(model, trace(model))
    train(model, optimizer, CHECK_EVERY + 3)
    for factor in (2.0, 2.0**70):
        with torch.no_grad():
            model[0].weight.mul_(factor)
            model[0].bias.mul_(factor)
            model[2].weight.div_(factor)
        train(model, optimizer, 1)
    assert model(torch.ones(1, 6)).isfinite().all()


def test_with_running_statistics_or_on_a_cpu_every_step_is_checked(checks, monkeypatch):
    """Anything may write those, and there is nothing to wait for."""
    model = nn.Sequential(*build()[:1], nn.BatchNorm1d(8), *build()[1:])
    optimizer = OPTIMIZERS["PathSGD"](model, trace(model, torch.ones(2, 6)))
    checks.clear()
    train(model, optimizer, 2 * CHECK_EVERY)
    assert len(checks) == 2 * CHECK_EVERY
    monkeypatch.setattr(gamma_cache, "_are_on_gpu", lambda tensors: False)
    model = build()
    optimizer = PathMuon(model, trace(model))
    checks.clear()
    train(model, optimizer, 2 * CHECK_EVERY)
    assert len(checks) == 2 * CHECK_EVERY


# Captured measurements


@pytest.fixture
def told(monkeypatch):
    """Whether each measurement had to check at once."""
    found, replay, start = [], MeasureAgain.replay, MeasureAgain.start
    capture_on_cpu(monkeypatch)
    for name, method in (("replay", replay), ("start", start)):
        monkeypatch.setattr(
            MeasureAgain, name, lambda own, check=False, method=method: (found.append(check), method(own))[1]
        )
    return found


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d])
def test_a_captured_measurement_is_told_at_once(norm, told):
    model = nn.Sequential(*build()[:1], norm(8), *build()[1:])
    optimizer = OPTIMIZERS["PathSGD"](model, trace(model, torch.ones(2, 6)))
    train(model, optimizer, 10)
    assert told
    assert not any(told[-2:])
    with torch.no_grad():
        model[0].weight.mul_(2)
    told.clear()
    train(model, optimizer, 1)
    assert any(told)
    told.clear()
    train(model, optimizer, 2)
    assert not any(told)


def test_a_second_optimizer_does_not_make_it_wait(told):
    model = build()
    optimizer = OPTIMIZERS["PathSGD"](model, trace(model))
    second = torch.optim.SGD(model[4].parameters(), 1e-3)
    for _ in range(2 * USUAL):
        train(model, optimizer, 1)
        second.step()
    assert any(told)
    assert not any(told[-4:])
