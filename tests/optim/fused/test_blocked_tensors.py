"""Plain steps of any network on a CPU, in blocks of rows, against the reference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd.graph.path_graph import remember_model
from pathsgd.optim.fused import blocked, blocked_tensors
from support import cases
from support.networks import Transformer, Vgg
from support.plain_steps import (
    EVENTS,
    OPTIMIZERS,
    assert_same,
    both_ways,
    channels_last,
    in_place,
    last_axis_first,
    run,
    start,
)
from support.training import pair

REFERENCE_BITS = ["PathSGD", "momentum", "nesterov", "fallback"]


@pytest.fixture(autouse=True, params=[40, blocked.BLOCK], ids=["small blocks", "one block"])
def _block(request, monkeypatch):
    monkeypatch.setattr(blocked_tensors, "BLOCK", request.param)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_steps(name):
    found, expected = both_ways(OPTIMIZERS[name], kind="blocked")
    assert_same(found, expected)
    if name in REFERENCE_BITS:
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("p", [1, 2, 4])
def test_every_p(p):
    def make(model, graph, **options):
        return OPTIMIZERS["momentum"](model, graph, p=p, lr=1e-4, **options)

    found, expected = both_ways(make, kind="blocked")
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_every_case(case):
    def build():
        return cases.build(case), cases.traced(case)

    def make(model, graph, **options):
        return OPTIMIZERS["AdamW"](model, graph, lr=1e-4, **options)

    model, graph = start(build, device="cpu")
    optimizer = make(model, graph)
    assert_same((run(model, optimizer), optimizer), both_ways(make, build, kind="reference")[1])


@pytest.mark.parametrize(("network", "name"), [(Vgg, "momentum"), (Vgg, "AdamW"), (Transformer, "Adam")])
def test_rescaled_copies_and_repeated_runs_give_the_same_bits(network, name):
    model, copied, graph, x = pair(network, torch.float32, powers_of_two=True)
    ends = []
    for own in (model, copy.deepcopy(model), copied):
        remembered = copy.copy(graph)
        remember_model(remembered, own)
        optimizer = OPTIMIZERS[name](own.eval(), remembered, lr=1e-5)
        for _ in range(2):
            optimizer.zero_grad()
            own(x).square().mean().backward()
            optimizer.step()
        assert "blocked" in optimizer.implementations.values()
        ends.append(own(x))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_tensors_in_any_layout(name):
    """torch's fused kernels read the memory of all tensors in the same order."""
    found, expected = both_ways(OPTIMIZERS[name], to=channels_last, kind="blocked", place=last_axis_first)
    assert not found[1].gamma_cache.model.conv.weight.is_contiguous()
    assert_same(found, expected)


def transpose_state(model, optimizer, k):
    if k == 1:
        state = optimizer.state[model.inner.weight]
        state["exp_avg"] = state["exp_avg"].mT.contiguous().mT


def test_state_that_lies_otherwise_is_for_the_reference():
    ends = []
    for kind in ("blocked", "reference"):
        model, graph = start(device="cpu")
        optimizer = OPTIMIZERS["AdamW"](model, graph, implementation=kind)
        ends.append((run(model, optimizer, steps=3, between=transpose_state), optimizer))
    assert ends[0][1].implementations["inner.weight"] == "reference"
    assert ends[0][1].implementations["head.weight"] == "blocked"
    assert_same(*ends)


@pytest.mark.parametrize("event", EVENTS)
def test_what_changes_between_steps_is_noticed(event):
    for name in ("AdamW", "momentum"):
        assert_same(*both_ways(OPTIMIZERS[name], kind="blocked", steps=4, between=event, place=in_place))


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_groups_differ_and_some_parameters_rest(name):
    def make(model, graph, **options):
        first, second, *rest = model.parameters()
        rest[-1].requires_grad_(False)
        option = {"betas": (0.5, 0.9)} if name == "AdamW" else {"momentum": 0.0}
        groups = [
            {"params": [first], "lr": 0.1, "weight_decay": 0.2}, {"params": [second], **option},
            {"params": rest},
        ]  # fmt: skip
        return OPTIMIZERS[name](groups, graph, **options)

    assert_same(*both_ways(make, kind="blocked"))


@pytest.mark.parametrize("name", ["PathSGD", "AdamW"])
def test_gammas_that_serve_several_steps(name):
    def make(model, graph, **options):
        return OPTIMIZERS[name](model, graph, refresh_every=2, lr=1e-3, **options)

    assert_same(*both_ways(make, kind="blocked", steps=4))


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_what_does_not_fit_is_for_the_reference(name):
    """Scalars, and weights of low precision."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3)
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.second(torch.relu(self.first(x)) * self.scale)

    for dtype, kinds in ((torch.float32, {"blocked", "reference"}), (torch.bfloat16, {"reference"})):
        model = Scaled().to(dtype)
        optimizer = OPTIMIZERS[name](model, pathsgd.trace(model, torch.ones(1, 2, 5, 5, dtype=dtype)))
        run(model, optimizer)
        assert set(optimizer.implementations.values()) == kinds


def test_writes_are_counted():
    """By torch, so that a backward pass through weights that have moved is an error."""
    model, graph = start(device="cpu")
    optimizer = OPTIMIZERS["AdamW"](model, graph)
    moved = [p for name, p in model.named_parameters() if graph.parameters[name].normalised]
    before = [p._version for p in moved]
    run(model, optimizer, 1)
    assert all(p._version > count for p, count in zip(moved, before, strict=True))
