"""What a captured step takes for granted, and when it is captured again.

Without a GPU: the graph is one that runs the step again when it is replayed.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pathsgd import PathMuon
from pathsgd.optim.gamma_cache import GammaCache
from pathsgd.optim.relative import captured_step, steps
from support.networks import Mlp, build


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

    def measure(cache, measurement, p):
        """Into the same tensors each time."""
        new = measurement.run(measurement.adapt(cache.graph), cache.graph.tensors(cache.model), p, None)
        old = found.setdefault((id(cache), measurement), new)
        for name, value in vars(new).items():
            kept = getattr(old, name)
            for a, b in zip(
                *((x.values() if isinstance(x, dict) else [x]) for x in (kept, value)), strict=True
            ):
                if isinstance(a, torch.Tensor):
                    a.copy_(b)
        return old

    monkeypatch.setattr(GammaCache, "_measure", measure)
    monkeypatch.setattr(GammaCache, "is_captured", lambda *_: True)
    monkeypatch.setattr(captured_step, "capture", RunAgain)
    monkeypatch.setattr(steps, "is_capturable", lambda *_: True)
    monkeypatch.setattr(RunAgain, "captures", 0)


def train(monkeypatch, event, *, captured, count=10, **options):
    model, x = build(Mlp, torch.float32)
    optimizer = PathMuon(model, x, **options)
    if not captured:
        monkeypatch.setattr(steps, "is_capturable", lambda *_: False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for k in range(count):
        event(k, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(len(x)) % 4).backward()
        optimizer.step()
        schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer


def nothing(k, optimizer):
    pass


def load(k, optimizer):
    if k == 5:
        optimizer.load_state_dict(optimizer.state_dict())


def decay(k, optimizer):
    if k == 5:
        optimizer.param_groups[0]["weight_decay"] = 0.1


def write_state(k, optimizer):
    if k == 5:
        for state in optimizer.state.values():
            for key in set(state) - {"step", "growth"}:
                state[key].zero_()


def freeze(k, optimizer):
    if k == 5:
        optimizer.param_groups[0]["params"][0].requires_grad_(False)


def write_weights(k, optimizer):
    if k == 5:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].mul_(2)


def replace_weights(k, optimizer):
    if k == 5:
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize(
    ("event", "captures"),
    [
        (nothing, 1),
        (load, 2),
        (decay, 2),
        (write_state, 1),
        (freeze, 2),
        (write_weights, 1),
        (replace_weights, 2),
    ],
)
def test_a_step_is_captured_again_when_what_it_read_has_moved(monkeypatch, event, captures):
    found, _ = train(monkeypatch, event, captured=True)
    assert RunAgain.captures == captures
    expected, _ = train(monkeypatch, event, captured=False)
    assert (found - expected).abs().max() <= 1e-6  # rates on the device are in fp32


def test_kernels_are_told_where_new_gradients_lie(monkeypatch):
    """They are not copied, and lie somewhere else in every step."""
    kept = []

    def keep(k, optimizer):
        kept.extend(p.grad for p in optimizer.param_groups[0]["params"])

    found, optimizer = train(monkeypatch, keep, captured=True, count=4, implementation="triton")
    assert RunAgain.captures == 1
    assert "triton" in optimizer.implementations.values()
    expected, _ = train(monkeypatch, nothing, captured=False, count=4, implementation="triton")
    assert (found - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_hooks_are_run(monkeypatch, implementation):
    calls = []

    def hook(k, optimizer):
        if k == 2:
            optimizer.base.register_step_post_hook(lambda *_: calls.append(1))

    train(monkeypatch, hook, captured=True, count=4, implementation=implementation)
    assert len(calls) == 2
