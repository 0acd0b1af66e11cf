"""Plain steps of any network on a CPU, in blocks of rows, against the reference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import pathsgd
from pathsgd.optim.fused import blocked, blocked_tensors
from support import cases
from support.networks import Transformer, Vgg
from support.plain_steps import (
    EVENTS,
    OPTIMIZERS,
    assert_same,
    both_ways,
    channels_last,
    check_rescaled_copies,
    in_place,
    last_axis_first,
    run,
    start,
)

REFERENCE_BITS = ["PathSGD", "momentum", "nesterov", "fallback"]


@pytest.fixture(autouse=True, params=[200, blocked.BLOCK], ids=["small blocks", "one block"])
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
    check_rescaled_copies(network, name, "blocked")


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_tensors_in_any_layout(name):
    """torch's fused kernels read the memory of all tensors in the same order."""
    found, expected = both_ways(OPTIMIZERS[name], to=channels_last, kind="blocked", place=last_axis_first)
    assert not found[1].gamma_cache.model.conv.weight.is_contiguous()
    assert_same(found, expected)


def test_a_large_matrix_by_columns_is_for_the_reference(monkeypatch):
    """It cannot be cut into rows, and blocks of its size would be kept."""
    model, graph = start(to=channels_last, device="cpu")
    optimizer = OPTIMIZERS["AdamW"](model, graph)
    monkeypatch.setattr(blocked_tensors, "BLOCK", 100)
    run(model, optimizer)
    assert optimizer.implementations["inner.weight"] == "reference"
    assert optimizer.implementations["conv.weight"] == "blocked"


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


def test_inference_mode_leaves_nothing_behind():
    """Blocks to compute in are kept, and tensors made in that mode cannot be written outside."""
    blocked._kept.blocks.clear()
    blocked._kept.memory = torch.empty(0)
    for mode in (True, False):
        model, graph = start(device="cpu")
        optimizer = OPTIMIZERS["PathSGD"](model, graph)
        with torch.inference_mode(mode):
            run(model, optimizer, 1, place=lambda grad, p: grad)


def test_a_hook_of_the_base_may_change_gradients():
    def shrink(optimizer, *_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(1e-3)

    def make(model, graph, **options):
        optimizer = OPTIMIZERS["SGD"](model, graph, **options)
        optimizer.base.register_step_pre_hook(shrink)
        return optimizer

    ends = []
    for kind in ("auto", "reference"):
        model, graph = start(device="cpu")
        ends.append(run(model, make(model, graph, implementation=kind)))
    assert torch.equal(*ends)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which torch calls itself
def test_steps_carry_tangents():
    ends = []
    for kind in ("auto", "reference"):
        model, graph = start(device="cpu")
        optimizer = OPTIMIZERS["PathSGD"](model, graph, implementation=kind)
        with forward_ad.dual_level():
            run(model, optimizer, 1, place=lambda grad, p: forward_ad.make_dual(grad, torch.ones_like(grad)))
            ends.append(forward_ad.unpack_dual(model.conv.weight).tangent)
    assert torch.equal(*ends)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("layer", [nn.Linear(3, 3), nn.Conv2d(3, 3, 1)], ids=["linear", "kernel"])
def test_a_unit_that_dies_where_exponents_are_needed(layer, implementation):
    """Its momentum is not zero, 1 / sqrt(gamma) is."""
    first, second, last = (copy.deepcopy(layer) for _ in range(3))
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
    with torch.no_grad():
        first.weight.mul_(1e-12)
        first.bias.zero_()
    x = torch.ones(1, 3) if layer.weight.dim() == 2 else torch.ones(1, 3, 2, 2)
    optimizer = pathsgd.PathSGD(model, x, lr=1e-3, momentum=0.9, implementation=implementation)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-10)
    optimizer.step()
    assert optimizer.gamma_cache.gammas(2).exponents
    with torch.no_grad():
        second.weight[1] = 0
        second.bias[1] = 0
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
