"""balance: one network for all rescalings of it, the one of least mu_{p,q}."""

from __future__ import annotations

import copy
import functools
import math
import statistics

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import PathError
from pathsgd.balancing import class_edges, exponents, least_mu
from pathsgd.balancing.balance import find_balancing_factors, find_rows, measure_mu
from pathsgd.balancing.class_edges import ClassFactors
from pathsgd.graph.unit_classes import FIXED, unit_classes_of
from support import cases, networks, starts
from support.starts import (
    KINDS,
    NETWORKS,
    Explosive,
    LowRank,
    Squares,
    are_equal,
    balanced,
    computes_the_same,
    largest_difference,
    measure_flow,
    measure_norms,
    rescaled,
    stack,
)

ORDERS = [(2, 2), (1, 1), (4, 4), (2, 4), (3, 1.5), (1, 2)]


STACKS = {
    "depth 10": lambda: stack(6, *[4] * 10), "depth 50": lambda: stack(6, *[4] * 50),
    "depth 150": lambda: stack(6, *[4] * 150),
    "depthwise": lambda: nn.Sequential(
        nn.Unflatten(1, (6, 1)), *[m for _ in range(20) for m in (nn.Conv1d(6, 6, 1, groups=6), nn.ReLU())],
        nn.Flatten(), nn.Linear(6, 2),
    ),
}  # fmt: skip
EVERY = [*STACKS, *NETWORKS]
MATRICES = [networks.Mlp, networks.PreActivation, networks.Recurrent, networks.Transformer, starts.DeadChain]
"""Networks in which classes are joined by matrices, of which small ones are listed edge by edge."""


@functools.cache
def build(name):
    """(model in fp64, an input, its graph)."""
    if name not in STACKS:
        return *starts.build(name), starts.traced(name)
    torch.manual_seed(0)
    model, x = STACKS[name]().double(), torch.rand(4, 6, dtype=torch.float64)
    return model, x, pathsgd.trace(model, x)


@functools.cache
def build_balanced(name):
    model, _, graph = build(name)
    return balanced(model, graph)


# One network for all


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EVERY)
def test_all_rescalings_become_one_network(name, kind):
    model, x, graph = build(name)
    result = balanced(rescaled(model, graph, kind), graph)
    assert largest_difference(build_balanced(name), result) <= (0 if kind == "powers of two" else 1e-11)
    assert computes_the_same(model, result, x)


@pytest.mark.parametrize("name", EVERY)
def test_powers_of_two_in_fp32_give_the_same_bits(name):
    model, _, graph = build(name)
    model = copy.deepcopy(model).float()
    # Through six squares weights take the 7th to the 13th power of a factor.
    other = rescaled(model, graph, "powers of two", 12 if name is Squares else 30)
    assert are_equal(balanced(model, graph), balanced(other, graph))


def test_factors_of_2_to_the_100_in_fp32():
    model, _, graph = build(networks.Mlp)
    model = copy.deepcopy(model).float()
    other = copy.deepcopy(model)
    pathsgd.rescale(other, graph, {"0": 2.0**-60, "2": 2.0**40})
    pathsgd.rescale(other, graph, {("0", 3): 2.0**100})
    assert are_equal(balanced(model, graph), balanced(other, graph))


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize(
    "name", [cases.Mlp, networks.PreActivation, networks.Recurrent, starts.ZeroBatchNorm, Squares]
)
def test_every_order_and_twice(name, orders):
    model, x, graph = build(name)
    result = balanced(model, graph, *orders)
    assert largest_difference(result, balanced(rescaled(model, graph, "log-normal"), graph, *orders)) <= 1e-11
    assert are_equal(result, balanced(rescaled(model, graph, "powers of two"), graph, *orders))
    assert computes_the_same(model, result, x)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        once = balanced(copy.deepcopy(model).to(dtype), graph, *orders)
        assert are_equal(once, balanced(once, graph, *orders)), dtype


@pytest.mark.parametrize("orders", [(2, 2), (3, 1.5)])
@pytest.mark.parametrize("name", MATRICES)
def test_matrices_and_lists_of_edges_agree(name, orders, monkeypatch):
    model, _, graph = build(name)
    expected = balanced(model, graph, *orders)
    monkeypatch.setattr(class_edges, "SMALL", 0)
    monkeypatch.setattr(class_edges, "CHUNK", 20)
    result = balanced(model, graph, *orders)
    assert largest_difference(expected, result) <= 1e-12
    assert are_equal(result, balanced(rescaled(model, graph, "powers of two"), graph, *orders))
    assert are_equal(result, balanced(result, graph, *orders))


# The minimum


@pytest.mark.parametrize(
    ("name", "orders"),
    [(name, orders) for name in (networks.Mlp, networks.Recurrent) for orders in ORDERS]
    + [(name, orders) for name in (networks.Vgg, Explosive, Squares) for orders in ((2, 2), (2, 4))],
)
def test_it_is_the_minimum_that_an_optimiser_finds(name, orders):
    """mu_{p,q} is written down anew here, from the classes of every entry; none of these has zeros. Norms are
    shifted in the first minimum, and stay so in the second."""
    p, q = orders
    model, _, graph = build(name)
    units, rows = unit_classes_of(graph), find_rows(graph)
    tensors = {n: t.detach() for n, t in graph.tensors(model).items()}
    log = torch.zeros(units.count, dtype=torch.float64, requires_grad=True)
    is_free = torch.arange(units.count) != FIXED

    def find_mu(log):
        free = units.relations.complete(torch.where(is_free, log, log.detach()))
        sums = torch.zeros(1 + max(int(r.max()) for r in rows.values()), dtype=torch.float64)
        for n, edge in units.parameters.items():
            powers = (tensors[n].abs() * torch.exp(free[edge.head] - free[edge.tail])).pow(p)
            sums = sums.index_add(0, rows[n].expand(powers.shape).flatten(), powers.flatten())
        return sums[sums > 0].pow(q / p).sum() ** (1 / q)

    def minimize():
        optimizer = torch.optim.LBFGS(
            [log], max_iter=500, line_search_fn="strong_wolfe", history_size=50, tolerance_grad=1e-9,
            tolerance_change=1e-15,
        )  # fmt: skip

        def closure():
            optimizer.zero_grad()
            mu = find_mu(log)
            mu.backward()
            return mu

        optimizer.step(closure)
        for _ in range(2):  # by Newton's method to the last digits
            gradient = torch.autograd.functional.jacobian(find_mu, log.detach())
            hessian = torch.autograd.functional.hessian(find_mu, log.detach())
            log.data -= torch.linalg.pinv(hessian, rtol=1e-9) @ gradient

    minimize()
    for norm in measure_norms(model, graph):
        factors = log.detach().exp()
        mean = statistics.fmean(gain * factors[k].item() for k, gain in norm.items())
        is_free[list(norm)] = False
        log.data[list(norm)] -= math.log(mean)
    if not bool(is_free[1:].all()):
        minimize()
    expected = find_mu(log).item()
    model = copy.deepcopy(model)
    result = pathsgd.balance(model, graph, p, q)
    assert result == pytest.approx(expected, rel=1e-10)
    assert result <= expected * (1 + 1e-13)
    stored = {n: graph.tensors(model)[n] for n in units.parameters}
    assert result == measure_mu(stored, p, q, rows)


@pytest.mark.parametrize("name", [networks.Mlp, networks.SmallResNet, networks.Transformer, Squares])
def test_what_arrives_is_what_leaves(name):
    """But behind a norm, whose mean gain is 1."""
    model, _, graph = build(name)
    result = balanced(model, graph)
    norms = measure_norms(result, graph)
    assert [statistics.fmean(norm.values()) for norm in norms] == pytest.approx([1] * len(norms), rel=1e-13)
    others = ~torch.isin(unit_classes_of(graph).free, torch.tensor([k for norm in norms for k in norm]))
    arriving, leaving = measure_flow(result, graph)
    torch.testing.assert_close(arriving[others], leaving[others], rtol=1e-11, atol=0)
    mu = pathsgd.balance(result, graph, unit_gains=False)
    torch.testing.assert_close(*measure_flow(result, graph), rtol=1e-11, atol=0)
    assert (mu < pathsgd.balance(result, graph)) == bool(norms)


@pytest.mark.parametrize(("orders", "expected"), [((2, 2), 30**0.5), ((1, 1), 10), ((1, 2), 58**0.5)])
def test_mu_of_stored_weights(orders, expected):
    rows = {"a": torch.tensor([[5], [7]]), "b": torch.tensor([5, 5])}
    tensors = {"a": torch.tensor([[1.0, -2.0], [3.0, 0.0]]), "b": torch.tensor([4.0, 0.0])}
    assert measure_mu(tensors, *orders, rows) == pytest.approx(expected, rel=1e-15)
    tiny = {name: 2.0**-140 * tensor for name, tensor in tensors.items()}
    assert measure_mu(tiny, *orders, rows) == pytest.approx(2.0**-140 * expected, rel=1e-15)
    assert measure_mu({}, *orders, rows) == 0
    assert measure_mu({"a": torch.zeros(2, 2)}, *orders, rows) == 0


@pytest.mark.parametrize(
    ("name", "most"),
    [("depth 10", 45), ("depth 50", 55), ("depth 150", 60), (Squares, 45), ("depthwise", 250)],
)
def test_it_converges_in_few_rounds(name, most, monkeypatch):
    model, _, graph = build(name)
    rounds = []
    measure = least_mu._Solver._measure
    monkeypatch.setattr(least_mu._Solver, "_measure", lambda *a: (rounds.append(1), measure(*a))[1])
    balanced(model, graph)
    assert len(rounds) <= most


# 16 bits


def mlp_of(dtype):
    torch.manual_seed(0)
    model = stack(6, 8, 7, 3).to(dtype)
    pathsgd.rescale(model, None, {"0": 2.0, ("0", 3): 8.0, "2": 0.5})
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rescaled_by_powers_of_two_and_the_function_stays_to_the_bit(dtype):
    model, x = mlp_of(dtype), torch.randn(5, 6, dtype=dtype)
    result = balanced(model, None)
    assert torch.equal(result(x), model(x))
    assert not are_equal(result, model)
    for p, q in zip(result.parameters(), model.parameters(), strict=True):
        assert set(torch.frexp(p.double() / q.double()).mantissa.flatten().tolist()) == {0.5}


def test_factors_of_16_bits_are_never_undone_by_a_second_call():
    """Here the best factor is exactly half way between two powers of two."""
    for pair in ((1.0, 2.0), (2.0, 1.0), (4.0, 0.5)):
        model = stack(1, 1, 1, bias=False).bfloat16()
        for layer, value in zip(model[::2], pair, strict=True):
            nn.init.constant_(layer.weight, value)
        for _ in range(3):
            pathsgd.balance(model)
            assert (model[0].weight.item(), model[2].weight.item()) == (1.0, 2.0)


class Mixed(nn.Module):
    """Gains in fp32 and matrices in bf16."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(6),
            nn.Linear(6, 5).bfloat16(),
            nn.Linear(5, 2).bfloat16(),
        )
        nn.init.constant_(self.norm.weight, 37.0)

    def forward(self, x):
        return self.down(self.up(self.norm(x).bfloat16()).relu())


def test_gains_in_fp32_beside_matrices_of_16_bits():
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(3, 6)
    result = balanced(model, pathsgd.trace(model, x))
    assert torch.equal(result(x), model(x))
    for p, q in zip(result.parameters(), model.parameters(), strict=True):
        assert (p[q != 0] / q[q != 0]).log2().frac().any().item() is False
    assert result.norm.weight.max() < 37


# What is refused, and what stays


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused_by_name_and_nothing_changes(bad):
    model = stack(6, 8, 3)
    model[2].weight.data[0, 0] = bad
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PathError, match=r"'2\.weight' holds nan or inf"):
        pathsgd.balance(model)
    assert all(
        torch.equal(a.nan_to_num(7), before[name].nan_to_num(7)) for name, a in model.state_dict().items()
    )


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ((0.5, 2), "Invalid p: 0.5"),
        ((math.nan, 2), "Invalid p: nan"),
        ((2, 0.5), "Invalid q: 0.5"),
        ((2, math.nan), "Invalid q: nan"),
        ((math.inf, 2), "p = inf needs q = inf"),
    ],
)
def test_orders_out_of_range_are_refused(orders, message):
    with pytest.raises(PathError, match=message):
        pathsgd.balance(stack(6, 8, 3), None, *orders)


def test_frozen_parameters_are_rescaled_and_held_classes_are_not():
    model = stack(6, 8, 3).requires_grad_(False)
    pathsgd.rescale(model, None, {"0": 16.0})
    graph = pathsgd.trace(model)
    units = unit_classes_of(graph)
    held = torch.arange(units.count) == 3
    factors = find_balancing_factors(graph.tensors(model), units, held=held)
    assert (factors.mantissa[3], factors.exponent[3]) == (1, 0)
    free = find_balancing_factors(graph.tensors(model), units)
    assert [(f.exponent != 0).sum().item() for f in (factors, free)] == [units.count - 2, units.count - 1]
    assert not are_equal(balanced(model, graph), model)


def test_a_unit_that_fades_keeps_a_share_of_its_layer():
    torch.manual_seed(0)
    model = stack(6, 8, 3).double()
    with torch.no_grad():
        model[2].weight[:, 0] *= 1e-40
    result = balanced(model, None)
    norms = torch.cat([result[0].weight, result[0].bias[:, None]], 1).norm(dim=1)
    assert norms[0].item() == pytest.approx(2.0**-20 * norms.mean().item(), rel=1e-6)
    assert are_equal(result, balanced(result, None))


@pytest.mark.parametrize("model", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Sigmoid())])
def test_a_network_without_units_stays(model):
    for orders in ORDERS:
        with pytest.warns(UserWarning, match="no unit of .* can be rescaled, so balance changes nothing"):
            assert are_equal(balanced(model, pathsgd.trace(model, torch.ones(1, 3)), *orders), model)


def test_many_units_without_weights_take_no_longer(monkeypatch):
    """As pruning leaves them."""
    model = stack(6, 300, 300, 3)
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.zero_(), layer.bias.zero_()
        model[0].weight[0] = model[2].weight[0, 0] = model[4].weight[0, 0] = 1
    calls, function = [], exponents.Learned.set
    monkeypatch.setattr(exponents.Learned, "set", lambda *a: (calls.append(1), function(*a))[1])
    balanced(model, None)
    assert len(calls) < 20


def test_factors_are_applied_in_range():
    """Each alone is out of the range of floats, their quotient is not."""
    model = stack(2, 2, 1).double()
    units = unit_classes_of(pathsgd.trace(model))
    before = model[2].weight.detach().clone()
    exponent = torch.full((units.count,), 3000)
    exponent[FIXED] = 2998
    factors = ClassFactors(torch.ones(units.count, dtype=torch.float64), exponent)
    factors.scale_(model[2].weight, units.parameters["2.weight"])
    assert torch.equal(model[2].weight, before / 4)


# These tests can fail


def test_without_the_exponents_bits_differ(monkeypatch):
    find = least_mu.find_exponents
    monkeypatch.setattr(least_mu, "find_exponents", lambda *a: torch.zeros_like(find(*a)))
    model, _, graph = build(networks.SmallResNet)
    other = rescaled(model, graph, "powers of two", 8)
    assert not are_equal(balanced(model, graph), balanced(other, graph))


def test_without_a_norm_for_classes_before_zeros_copies_stay_apart(monkeypatch):
    monkeypatch.setattr(least_mu._Solver, "_settle_others", lambda self, t: t)
    model, _, graph = build(LowRank)
    other = rescaled(model, graph, "log-normal")
    assert largest_difference(balanced(model, graph), balanced(other, graph)) > 1e-3


def test_without_the_power_of_squares_the_function_changes(monkeypatch):
    model, x, graph = build(Squares)
    assert computes_the_same(model, balanced(model, graph), x)
    monkeypatch.setattr(
        ClassFactors, "complete",
        lambda self, r: ClassFactors(self.mantissa.index_fill(0, r.derived.of, 1), self.exponent),
    )  # fmt: skip
    assert not computes_the_same(model, balanced(model, graph), x)


@pytest.mark.parametrize("attends", [False, True])
def test_products_of_units_that_are_far_from_balanced(attends):
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    for seed in range(5):
        torch.manual_seed(seed)
        model = networks.Products(attends).double()
        for p in model.parameters():
            p.data.normal_()
        graph, rescaled = pathsgd.trace(model, x), copy.deepcopy(model)
        pathsgd.unbalance(rescaled, graph, units=100)
        pathsgd.balance(model, graph), pathsgd.balance(rescaled, graph)
        for p, other in zip(model.parameters(), rescaled.parameters(), strict=True):
            torch.testing.assert_close(p, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("p", [8, 16, 32])
def test_powers_that_underflow(p):
    """What leads into and out of a unit is so small that its p-th powers are zero, on one side or on both."""
    model = stack(6, 8, 8, 2).double()
    linear = [module for module in model if isinstance(module, nn.Linear)]
    with torch.no_grad():
        linear[0].weight[0] *= 1e-25
        linear[0].bias[0] *= 1e-25
        linear[1].weight[:, 0] *= 1e-25
        linear[1].weight[1] *= 1e-60
        linear[1].bias[1] *= 1e-60
    graph = pathsgd.trace(model)
    copied = copy.deepcopy(model)
    pathsgd.unbalance(copied, graph, generator=torch.Generator().manual_seed(0))
    first, second = balanced(model, graph, p, p), balanced(copied, graph, p, p)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=0)
    again = balanced(first, graph, p, p)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    x = torch.rand(4, 6, dtype=torch.float64)
    torch.testing.assert_close(first(x), model(x))
