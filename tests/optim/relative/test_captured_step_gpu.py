"""Relative steps that the optimizer captures in a CUDA graph, against those it runs: ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from pathsgd.optim.relative import captured_step, default_rate, steps
from torch.nn import functional as F

from pathsgd import PathAdam, PathMuon, PathNormalized, PathSGD
from support.events import CAPTURES, nothing
from support.networks import Mlp, Recurrent, SmallResNet, Transformer, build

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "PathMuon": PathMuon,
    "PathMuon on weights": lambda model, x: PathMuon(model, x, coordinates="weights"),
    "PathAdam": PathAdam,
    "PathAdam, fused": lambda model, x: PathAdam(model, x, fused=True),
    "PathSGD": lambda model, x: PathSGD(model, x, relative=True, momentum=0.9),
    "Adagrad": lambda model, x: PathNormalized(torch.optim.Adagrad, model, x, relative=True),
}


def train(model, x, optimizer, count, event=nothing):
    for group in optimizer.param_groups:
        group["lr"] = 1 / 16
    # Rates that fp32 has, since they are rounded to it on the device: after 24 steps that alone makes 1e-4.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 32)
    for k in range(count):
        if k == count // 2:
            event(optimizer)
        optimizer.zero_grad()
        outputs = model(x)
        F.cross_entropy(outputs.flatten(1), torch.arange(len(outputs), device="cuda")).backward()
        optimizer.step()
        schedule.step()


def without_schedule(model, x, optimizer, count, event=nothing):
    for _ in range(count):
        optimizer.zero_grad()
        outputs = model(x)
        F.cross_entropy(outputs.flatten(1), torch.arange(len(outputs), device="cuda")).backward()
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] < optimizer.default_lr / 2


def both_ways(monkeypatch, kind, name, event=nothing, count=24, train=train):
    """The weights after training by captured steps and by others, and how many were captured."""
    ends = []
    for captured in (True, False):
        torch.manual_seed(0)
        model, x = build(kind, torch.float32)
        model, x = model.cuda().train(), x.cuda()
        optimizer = OPTIMIZERS[name](model, x)
        if not captured:
            monkeypatch.setattr(steps, "is_capturable", lambda *_: False)
        train(model, x, optimizer, count, event)
        ends.append((torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer))
    (found, optimizer), (expected, _) = ends
    step = optimizer._relative._captured
    return found, expected, step is not None and step.graph is not None


def gap(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("kind", [Mlp, SmallResNet, Recurrent, Transformer])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_captured_step_is_the_step(monkeypatch, kind, name):
    """Under a schedule; Adagrad, which counts its steps on the host, is not captured."""
    found, expected, captured = both_ways(monkeypatch, kind, name)
    assert captured == (name != "Adagrad")
    assert gap(found, expected) <= 1e-5


@pytest.mark.parametrize("event", CAPTURES)
@pytest.mark.parametrize("name", ["PathMuon", "PathAdam"])
def test_a_captured_step_follows_what_changes(monkeypatch, name, event):
    found, expected, captured = both_ways(monkeypatch, SmallResNet, name, event)
    assert captured
    assert gap(found, expected) <= 1e-5


@pytest.mark.parametrize("name", ["PathMuon", "PathAdam"])
def test_the_default_rate_falls_from_replay_to_replay(monkeypatch, name):
    """And what is captured once is replayed: nothing is captured again for a new rate."""
    monkeypatch.setattr(default_rate, "HOLD", 4)
    captures = []
    capture = captured_step.capture
    monkeypatch.setattr(captured_step, "capture", lambda step: captures.append(step) or capture(step))
    found, expected, captured = both_ways(monkeypatch, SmallResNet, name, train=without_schedule)
    assert captured
    assert len(captures) == 1
    assert gap(found, expected) <= 1e-4  # rates are rounded to fp32 on the device


def test_writes_are_counted():
    """By torch, so that a backward pass through weights that have moved is an error."""
    model, x = build(Mlp, torch.float32)
    model, x = model.cuda(), x.cuda()
    optimizer = PathMuon(model, x)
    train(model, x, optimizer, 12)
    outputs = model(x)
    outputs.sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
