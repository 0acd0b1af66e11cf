"""Stacks of linear layers moved by blocks and by kernels, against the formula in torch operations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import PathSGD
from pathsgd.paths.blocked import BlockedChain
from pathsgd.paths.chain import Moved, Rule, find_chains, order_sums
from support.networks import SmallResNet, traced
from support.stacks import assert_close, is_fused, rescaled, stack, train
from support.stacks import traced as traced_stack

OPTIONS = {
    "plain": {"lr": 1e-2},
    "momentum": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True},
    "p=1": {"lr": 1e-4, "p": 1},
    "p=4": {"lr": 1e-4, "p": 4, "momentum": 0.5},
    "tensor lr": {"lr": torch.tensor(1e-2, dtype=torch.float64), "weight_decay": 0.1},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = [(20, 33, 5), (20, 70, 33, 5), (20, 70, 60, 50, 5)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_blocks_take_the_steps_of_the_formula(widths, bias, options, monkeypatch):
    monkeypatch.setattr("pathsgd.paths.blocked.BLOCK", 500)  # so that a layer has several
    for dtype, rtol in ((torch.float32, 1e-6),):
        start = stack(*widths, bias=bias, dtype=dtype)
        moved, optimizer = train(copy.deepcopy(start), **options)
        expected, reference = train(copy.deepcopy(start), fused=False, **options)
        assert is_fused(optimizer)
        assert not is_fused(reference)
        assert_close(moved, expected, rtol)


@pytest.mark.parametrize("fused", [None, False])
def test_a_rescaled_stack_takes_the_same_steps_to_the_bit(fused):
    start = stack(20, 70, 33, 5)
    (a, _), (b, _) = (
        train(m, steps=5, lr=1e-2, momentum=0.9, fused=fused) for m in (copy.deepcopy(start), rescaled(start))
    )
    x = torch.randn(4, 20)
    assert torch.equal(a(x), b(x))


def test_groups_with_rates_of_their_own():
    ends = []
    for fused in (None, False):
        model = stack(20, 70, 5)
        groups = [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
            {"params": [model[0].bias, model[2].bias], "lr": 1e-3},
        ]
        graph = pathsgd.trace(model)
        optimizer = PathSGD(groups, graph=graph, lr=1e-2, fused=fused)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 20)).square().sum().backward()
            optimizer.step()
        assert is_fused(optimizer) == (fused is None)
        ends.append(model)
    assert_close(*ends)


def test_what_is_out_of_range_is_left_to_the_formula():
    """Units rescaled by 2^60 to both sides: fp32 does not hold 1 / sqrt(gamma) of all weights."""
    start = stack(20, 70, 33, 5)
    wild = copy.deepcopy(start)
    factors = {("0", 0): 2.0**60, ("0", 1): 2.0**-60, ("2", 0): 2.0**60, ("2", 1): 2.0**-60}
    pathsgd.rescale(wild, traced_stack(start), factors)
    (expected, _), (moved, _) = (
        train(m, steps=3, lr=1e-2, fused=f) for m, f in ((start, False), (wild, None))
    )
    x = torch.randn(4, 20)
    assert torch.equal(moved(x), expected(x))


def step_after(change, p, fused):
    """A step, the change, and another step."""
    model = stack(20, 30, 30, 10)
    optimizer = PathSGD(model, lr=1e-3, p=p, fused=fused)
    for seed in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 20, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        if not seed:
            change(model)
    return model


def rescale_a_unit(model):
    pathsgd.rescale(model, None, {("0", 3): 2.0**70})


def shrink_a_layer(model):
    with torch.no_grad():
        model[0].weight.mul_(1e-20)
        model[0].bias.mul_(1e-20)


def spoil_a_weight(model):
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("change", [rescale_a_unit, shrink_a_layer, spoil_a_weight])
def test_what_leaves_the_range_between_two_checks_is_left_to_the_formula(change, p):
    moved, expected = (step_after(change, p, fused).parameters() for fused in (None, False))
    for a, b in zip(moved, expected, strict=True):
        largest = float(b.detach().nan_to_num().abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * largest, equal_nan=True)


def test_a_step_in_inference_mode_and_one_outside_of_it():
    with torch.inference_mode(False):
        model = stack(20, 30, 10)
    optimizer = PathSGD(model, lr=1e-3)
    for mode in (True, False):
        model(torch.ones(4, 20)).sum().backward()
        with torch.inference_mode(mode):
            optimizer.step()


def test_an_output_that_is_added_to_itself_is_no_chain():
    class Doubled(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            return y + y

    assert find_chains(pathsgd.trace(Doubled(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))) == []


def test_chains_that_are_found():
    assert [len(chain) for chain in find_chains(traced_stack(stack(4, 5, 6, 2)))] == [3]
    assert find_chains(traced(SmallResNet)) == []
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
    assert [len(chain) for chain in find_chains(pathsgd.trace(model))] == [2]


@pytest.mark.parametrize("count", range(2, 8))
def test_every_sum_is_taken_once_and_after_what_it_needs(count):
    into, out = {0}, {count - 1}
    for layers in order_sums(count):
        ready = set(into), set(out)
        for k, (rows, columns) in layers.items():
            if rows:
                assert k in ready[0]
                into.add(k + 1)
            if columns:
                assert k in ready[1]
                out.add(k - 1)
    assert into == out == set(range(count))


@pytest.mark.parametrize(
    ("widths", "p", "momentum"),
    [((9, 4), 1, 0.9), ((9, 4), 4, 0.0), ((300, 140, 5), 2, 0.9), ((9, 20, 17, 13, 4), 2, 0.0)],
    ids=str,
)
def test_kernels_compute_what_blocks_do(widths, p, momentum):
    """By Triton's interpreter where there is no GPU."""
    from pathsgd.paths.kernels import KernelChain

    ends = []
    for device, kind in (("cpu", BlockedChain), (DEVICE, lambda c: KernelChain(c, torch.device(DEVICE)))):
        model = stack(3, *widths, bias=p != 1).to(device)
        (chain,) = find_chains(traced_stack(model))
        step = kind(chain)
        generator = torch.Generator().manual_seed(0)
        state = {}
        for k in range(2):
            moves = []
            for layer in chain:
                pair = [None, None]
                for j, name in enumerate(layer.names):
                    w = model.get_parameter(name)
                    g = torch.randn(w.shape, generator=generator).to(device)
                    b = state.setdefault(name, torch.zeros_like(w)) if momentum else None
                    pair[j] = Moved(w, g, b, 1e-2 * (k + 1), 0.1 * j)
                moves.append(tuple(pair))
            assert step.measure(moves, p)
            step.move(moves, Rule(p, momentum, momentum > 0, False))
        ends.append(model.cpu())
    assert_close(*ends)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_kernels_on_a_gpu(options, captured):
    """Eager steps are replayed from a graph of our own after the first three; or the user captures all."""
    start = stack(784, 400, 300, 10).cuda()
    x, y = torch.randn(50, 784, device="cuda"), torch.randint(10, (50,), device="cuda")
    lr = options["lr"].cuda() if isinstance(options["lr"], torch.Tensor) else options["lr"]
    ends = []
    for fused in (None, False):
        model = copy.deepcopy(start)
        optimizer = PathSGD(model, x[:1], **{**options, "lr": lr}, fused=fused)

        def step(model=model, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for _ in range(5):
            step()
        assert is_fused(optimizer) == (fused is None)
        ends.append(model)
    assert_close(*ends, rtol=1e-5)
