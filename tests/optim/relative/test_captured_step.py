"""What a captured step takes for granted, and when it is captured again.

Without a GPU: the graph is one that runs the step again when it is replayed.
"""

from __future__ import annotations

import pytest
import torch
from pathsgd.optim.gamma_cache import GammaCache
from pathsgd.optim.relative import captured_step, steps
from pathsgd.optim.relative.gpu.step import KernelStep
from torch.nn import functional as F

from pathsgd import PathAdam, PathMuon
from pathsgd.graph.export import tensors_in
from support.events import AT, CAPTURES, nothing
from support.networks import Mlp, build, traced


class RunAgain:
    """In place of a CUDA graph: what was captured is run at every replay, with the tensors of the capture."""

    captures = 0

    def __init__(self, step):
        self.step = step
        RunAgain.captures += 1

    def replay(self):
        with self.step.on_device():
            self.step.run()


@pytest.fixture(autouse=True)
def captured_on_cpu(monkeypatch):
    found = {}

    def measure(cache, measurement, p, tensors):
        """Into the same tensors each time."""
        new = measurement.run(measurement.adapt(cache.graph), tensors, p, None)
        old = found.setdefault((id(cache), measurement), new)
        for a, b in zip(tensors_in(vars(old)), tensors_in(vars(new)), strict=True):
            a.copy_(b)
        return old

    monkeypatch.setattr(GammaCache, "_measure", measure)
    monkeypatch.setattr(GammaCache, "is_captured", lambda *_: True)
    monkeypatch.setattr(captured_step, "capture", RunAgain)
    monkeypatch.setattr(steps, "is_capturable", lambda *_: True)
    monkeypatch.setattr(RunAgain, "captures", 0)


def train(monkeypatch, event, *, captured, count=10, make=PathMuon, dtype=torch.float32, **options):
    model, x = build(Mlp, dtype)
    optimizer = make(model, traced(Mlp, dtype), **options)
    if not captured:
        monkeypatch.setattr(steps, "is_capturable", lambda *_: False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for k in range(count):
        if k == min(AT, count // 2):
            event(optimizer)
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(len(x)) % 4).backward()
        optimizer.step()
        schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer


@pytest.mark.parametrize(("event", "captures"), CAPTURES.items())
def test_a_step_is_captured_again_when_what_it_read_has_moved(monkeypatch, event, captures):
    """In fp64: rates on the device are in fp32, and ten steps in fp32 would blow that up to 1e-6 and more."""
    found, _ = train(monkeypatch, event, captured=True, dtype=torch.float64)
    assert RunAgain.captures == captures
    expected, _ = train(monkeypatch, event, captured=False, dtype=torch.float64)
    assert (found - expected).abs().max() <= 1e-7


@pytest.mark.parametrize("make", [PathMuon, PathAdam])
def test_kernels_are_told_where_new_gradients_lie(monkeypatch, make):
    """They are not copied, and lie somewhere else in every step."""
    places = []
    point = KernelStep.point

    def move(step, gradients_only=False):
        for p in step.parameters.values():
            places.append(p.grad)  # kept, so that the next gradient lies elsewhere
        point(step, gradients_only)

    monkeypatch.setattr(KernelStep, "point", move)
    options = {"count": 4, "make": make, "implementation": "triton"}
    found, optimizer = train(monkeypatch, nothing, captured=True, **options)
    assert len({grad.data_ptr() for grad in places}) == len(places)
    assert RunAgain.captures == 1
    assert "triton" in optimizer.implementations.values()
    expected, _ = train(monkeypatch, nothing, captured=False, **options)
    assert (found - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_hooks_are_run(monkeypatch, implementation):
    calls = []

    def hook(optimizer):
        optimizer.base.register_step_post_hook(lambda *_: calls.append(1))

    train(monkeypatch, hook, captured=True, count=4, implementation=implementation)
    assert len(calls) == 2
