"""Nothing that a model shares with others is different after a trace, failed or not."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import random

import numpy as np
import pytest
import torch

import pathsgd
from support.holder import Cache, Holder, trace


def test_what_other_threads_and_the_process_share_is_left_alone():
    held = {"queue": queue.Queue(), "logger": logging.getLogger(__name__)}
    for number in range(100):
        held["queue"].put(number)

    def write(model, y):
        model.held["queue"].get()  # as its consumer may do at any time
        model.held["logger"].getChild("made_in_the_forward")

    model = Holder(held, write, False)
    pathsgd.trace(model, torch.randn(2, 4))
    assert held["queue"].queue[0] > 0
    assert f"{__name__}.made_in_the_forward" in logging.root.manager.loggerDict


def test_a_model_that_refers_to_a_large_dataset():
    """Not all of it is looked at, but what is nearer to the model is."""
    held = Cache()  # export itself would walk through a dict
    held.numbers, held.samples = list(range(500_000)), [[number] for number in range(500_000)]
    pathsgd.trace(Holder(held, lambda model, y: model.held.write(y), False), torch.randn(2, 4))
    assert (held.keys, held.length) == ([], 0)
    assert not hasattr(held, "newest")
    assert len(held.numbers) == len(held.samples) == 500_000


def list_in_a_closure():
    """As that of a hook that collects activations."""
    seen, last = ["first"], None

    def hook(y):
        nonlocal last
        seen.append(y)
        last = y

    return hook, lambda: (list(seen), last)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_function_closes_over(fails):
    hook, look = list_in_a_closure()
    partial = functools.partial(list.append, [])
    trace([hook, partial], lambda model, y: [write(y) for write in model.held], fails)
    assert look() == (["first"], None)
    assert partial.args == ([],)


PROCESS = {
    "a number": (lambda model: random.random(), random.getstate),
    "numpy's number": (lambda model: np.random.rand(), lambda: str(np.random.get_state())),
    "torch's number": (lambda model: torch.rand(2), lambda: torch.get_rng_state().tolist()),
    "seed": (lambda model: torch.manual_seed(9), lambda: torch.get_rng_state().tolist()),
    "dtype": (lambda model: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "grad mode": (lambda model: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "autocast": (
        lambda model: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")
    ),
}  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("case", PROCESS)
def test_what_the_process_shares(case, fails):
    write, look = PROCESS[case]
    model = Holder(None, lambda model, y: write(model), fails)
    x = torch.ones(2, 4)
    before = look()
    with contextlib.suppress(pathsgd.TraceError):
        pathsgd.trace(model, x)
    assert look() == before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda model: model.zero_grad(),
        lambda model: model.requires_grad_(False),
        lambda model: model.a.weight.grad.mul_(2),
        lambda model: torch.rand(2, generator=model.held),
        lambda model: model.eval(),
    ],
)
def test_gradients_and_flags(write, fails):
    model = Holder(torch.Generator(), lambda model, y: write(model), fails)
    model.a.weight.grad = gradient = torch.ones(4, 4)
    state = model.held.get_state()
    with contextlib.suppress(pathsgd.TraceError):
        pathsgd.trace(model, torch.ones(2, 4))
    assert model.a.weight.grad is gradient
    assert bool((gradient == 1).all())
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(model.held.get_state(), state)
    assert all(module.training for module in model.modules())
