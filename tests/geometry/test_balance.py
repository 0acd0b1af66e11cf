"""balance: one network for all rescalings of it, the one of least mu_{p,q}."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import PathError
from pathsgd.geometry import least_mu
from pathsgd.geometry.balance import find_balancing_factors, find_rows
from pathsgd.geometry.class_edges import ClassFactors
from pathsgd.geometry.rescale import apply_factors
from pathsgd.graph.unit_classes import FIXED, unit_classes_of
from support import cases, networks

ORDERS = [(2, 2), (1, 1), (4, 4), (2, 4), (3, 1.5), (1, 2)]


def stack(*widths):
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Adapter(nn.Module):
    """LoRA: the second factor is zero."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 3, bias=False), nn.Linear(3, 5, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(7)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x).relu().square()
        return self.layers[-1](x)


class Loud(nn.Module):
    """W_hh = 100 I."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(6, 5, nonlinearity="relu", batch_first=True), nn.Linear(5, 2)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(100 * torch.eye(5))

    def forward(self, x):
        return self.head(self.rnn(x[:, None].expand(-1, 3, -1))[0][:, -1])


class Branch(nn.Module):
    """Residual branches whose gains are zero, wholly and in part; weights used twice."""

    def __init__(self):
        super().__init__()
        self.tied, self.norm, self.branch = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.gain, self.head = nn.Parameter(torch.zeros(6)), nn.Linear(6, 2)
        with torch.no_grad():
            self.norm.weight[:3] = 0

    def forward(self, x):
        x = self.tied(self.tied(x).relu()).relu()
        x = x + self.norm(x).relu()
        return self.head(x + self.gain * self.branch(x).relu())


def zero_head():
    model = stack(6, 8, 7, 3)
    nn.init.zeros_(model[-1].weight)
    return model


def dead_chain():
    """Unit 0 of the first layer has no input and leads to unit 0 of the second, which leads nowhere."""
    model = stack(6, 8, 7, 3)
    with torch.no_grad():
        model[0].weight[0] = model[0].bias[0] = 0
        model[2].weight[0, 1:] = model[2].bias[0] = model[4].weight[:, 0] = 0
        model[0].weight[1] = model[0].bias[1] = 0
        model[2].weight[:, 2] = 0
    return model


STARTS = {
    "LoRA": Adapter, "zero head": zero_head, "zero gains": Branch, "dead chain": dead_chain,
    "squares": Squares, "loud recurrence": Loud, "depth 60": lambda: stack(*[6] * 61),
    "depthwise": lambda: nn.Sequential(
        nn.Unflatten(1, (6, 1)), *[m for _ in range(8) for m in (nn.Conv1d(6, 6, 1, groups=6), nn.ReLU())],
        nn.Flatten(), nn.Linear(6, 2),
    ),
}  # fmt: skip
KINDS = ["log-normal", "powers of two", "one tiny unit"]


@functools.cache
def build(name):
    """(model in fp64, an input, its graph)."""
    torch.manual_seed(0)
    if isinstance(name, str):
        model, x = STARTS[name]().double().eval(), torch.randn(4, 6, dtype=torch.float64)
        return model, x, pathsgd.trace(model, x)
    if name in cases.CASES:
        model = cases.build(name).eval()
        x = model.example(4)
        x = torch.arange(x.numel()).reshape(x.shape) % 3 if x.dtype == torch.int64 else x
        return model.double(), x, cases.traced(name)
    model, x = networks.build(name)
    return model, x, networks.traced(name, torch.float64)


def rescaled(model, graph, kind, exponent=30):
    """A copy of the model."""
    units = unit_classes_of(graph)
    generator = torch.Generator().manual_seed(1)
    log = exponent / 3 * torch.randn(units.count, generator=generator, dtype=torch.float64)
    log = log.clamp(-exponent, exponent)
    if kind == "one tiny unit":
        log = torch.zeros_like(log)
        log[-1] = math.log2(1e-12)
    copied = copy.deepcopy(model)
    apply_factors(graph.tensors(copied), units, torch.exp2(log.round() if kind == "powers of two" else log))
    return copied


def outputs(model, x):
    found = model(x)
    return found[0] if isinstance(found, tuple) else found


def largest_difference(a, b):
    """Of weights, relative to the largest of their parameter."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(((p - q).abs().max() / p.abs().max().clamp(min=1e-300)).item() for p, q in pairs if p.numel())


def are_equal(a, b):
    return all(map(torch.equal, a.parameters(), b.parameters()))


NAMES = [*STARTS, *cases.RESCALABLE, *networks.NETWORKS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_all_rescalings_become_one_network(name, kind):
    model, x, graph = build(name)
    other = rescaled(model, graph, kind, 5 if name == "squares" else 30)
    model = copy.deepcopy(model)
    before = outputs(model, x)
    for m in (model, other):
        pathsgd.balance(m, graph)
    assert largest_difference(model, other) <= 1e-9
    if kind == "powers of two":
        assert are_equal(model, other)
    assert ((outputs(model, x) - before).abs().max() <= 1e-12 * before.abs().max()).item()


@pytest.mark.parametrize("name", NAMES)
def test_powers_of_two_in_fp32_give_the_same_bits(name):
    model, _, graph = build(name)
    model = copy.deepcopy(model).float()
    copies = [copy.deepcopy(model), rescaled(model, graph, "powers of two", 5 if name == "squares" else 30)]
    for m in copies:
        pathsgd.balance(m, graph)
    assert are_equal(*copies)


def test_factors_of_2_to_the_100_in_fp32():
    model, _, graph = build(networks.Mlp)
    model = copy.deepcopy(model).float()
    other = copy.deepcopy(model)
    pathsgd.rescale(other, graph, {"0": 2.0**-60, "2": 2.0**40})
    pathsgd.rescale(other, graph, {("0", 3): 2.0**100})
    for m in (model, other):
        pathsgd.balance(m, graph)
    assert are_equal(model, other)


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize(
    "name", [cases.Mlp, networks.PreActivation, networks.SmallResNet, "zero gains", "squares"]
)
def test_every_order_and_twice(name, orders):
    model, x, graph = build(name)
    other = rescaled(model, graph, "log-normal", 4)
    model = copy.deepcopy(model)
    before = outputs(model, x)
    reached = [pathsgd.balance(m, graph, *orders) for m in (model, other)]
    assert reached[0] == pytest.approx(reached[1], rel=1e-10)
    assert largest_difference(model, other) <= 1e-9
    assert ((outputs(model, x) - before).abs().max() <= 1e-12 * before.abs().max()).item()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        m = copy.deepcopy(model).to(dtype)
        pathsgd.balance(m, graph, *orders)
        again = copy.deepcopy(m)
        pathsgd.balance(again, graph, *orders)
        assert are_equal(m, again), dtype


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize(
    "name", [networks.Mlp, networks.Vgg, networks.PreActivation, networks.Recurrent, "squares"]
)
def test_it_is_the_minimum_that_an_optimiser_finds(name, orders):
    """mu_{p,q} is written down anew here, from the classes of every entry; none of these has zeros."""
    model, _, graph = build(name)
    p, q = orders
    units, rows = unit_classes_of(graph), find_rows(graph)
    tensors = {n: t.detach().double() for n, t in graph.tensors(model).items()}
    log = torch.zeros(units.count, dtype=torch.float64, requires_grad=True)

    def find_mu(log):
        free = torch.cat([log.new_zeros(1), log[1:]])
        sums = torch.zeros(1 + max(int(r.max()) for r in rows.values()), dtype=torch.float64)
        for n, edge in units.parameters.items():
            powers = (tensors[n].abs() * torch.exp(free[edge.head] - edge.degree * free[edge.tail])).pow(p)
            sums = sums.index_add(0, rows[n].expand(powers.shape).flatten(), powers.flatten())
        return sums[sums > 0].pow(q / p).sum() ** (1 / q)

    optimizer = torch.optim.LBFGS(
        [log], max_iter=2000, line_search_fn="strong_wolfe", history_size=50, tolerance_grad=1e-12,
        tolerance_change=1e-16,
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        mu = find_mu(log)
        mu.backward()
        return mu

    optimizer.step(closure)
    found = pathsgd.balance(copy.deepcopy(model), graph, p, q)
    assert found == pytest.approx(find_mu(log).item(), rel=1e-9)
    assert found <= find_mu(log).item() * (1 + 1e-12)


@pytest.mark.parametrize("name", [networks.Mlp, networks.SmallResNet, networks.Transformer, "squares"])
def test_what_arrives_is_what_leaves(name):
    """For p = q = 2; behind a square twice as much arrives."""
    model, _, graph = build(name)
    model = copy.deepcopy(model)
    pathsgd.balance(model, graph)
    units = unit_classes_of(graph)
    arriving, leaving = torch.zeros(2, units.count, dtype=torch.float64)
    for n, edge in units.parameters.items():
        square = graph.tensors(model)[n].detach().square()
        arriving.index_add_(0, edge.head.expand(square.shape).flatten(), square.flatten())
        leaving.index_add_(0, edge.tail.expand(square.shape).flatten(), edge.degree * square.flatten())
    torch.testing.assert_close(arriving[1:], leaving[1:], rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rescaled_by_powers_of_two_and_the_function_stays_to_the_bit(dtype):
    torch.manual_seed(0)
    model = stack(6, 8, 7, 3).to(dtype)
    x = torch.randn(5, 6, dtype=dtype)
    pathsgd.rescale(model, None, {"0": 8.0, "2": 0.5})  # which makes no weight subnormal
    before, start = model(x), copy.deepcopy(model)
    pathsgd.balance(model)
    assert torch.equal(model(x), before)
    assert not are_equal(model, start)
    for p, q in zip(model.parameters(), start.parameters(), strict=True):
        assert set(torch.frexp((p / q).float()).mantissa.flatten().tolist()) == {0.5}


def test_gains_in_fp32_beside_matrices_of_16_bits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4).bfloat16())
    model[0].weight.data *= 37.0
    before = copy.deepcopy(model)
    pathsgd.balance(nn.Sequential(*model).to(torch.bfloat16), torch.randn(2, 6, dtype=torch.bfloat16))
    graph = pathsgd.trace(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4)), torch.randn(2, 6))
    units, tensors = unit_classes_of(graph), dict(before.named_parameters())
    factors = find_balancing_factors(tensors, units)
    assert set(factors.mantissa.tolist()) == {1.0}
    assert bool((factors.exponent != 0).any())


def test_nan_and_inf_are_refused_by_name_and_nothing_changes():
    for bad in (math.nan, math.inf):
        model = stack(6, 8, 3)
        model[2].weight.data[0, 0] = bad
        before = copy.deepcopy(model)
        with pytest.raises(PathError, match=r"'2\.weight' holds nan or inf"):
            pathsgd.balance(model)
        assert torch.equal(model[0].weight, before[0].weight)


@pytest.mark.parametrize("orders", [(0.5, 2), (2, 0.5), (math.nan, 2), (2, math.nan), (math.inf, 2)])
def test_orders_out_of_range_are_refused(orders):
    with pytest.raises(PathError):
        pathsgd.balance(stack(6, 8, 3), None, *orders)


def test_frozen_parameters_are_rescaled_and_held_classes_are_not():
    model = stack(6, 8, 3).requires_grad_(False)
    pathsgd.rescale(model, None, {"0": 16.0})
    before = copy.deepcopy(model)
    graph = pathsgd.trace(model)
    units = unit_classes_of(graph)
    held = torch.zeros(units.count, dtype=torch.bool)
    held[3] = True
    factors = find_balancing_factors(graph.tensors(model), units, held=held)
    assert (factors.mantissa[3], factors.exponent[3]) == (1, 0)
    pathsgd.balance(model, graph)
    assert not are_equal(model, before)


def test_a_unit_that_fades_keeps_a_share_of_its_layer():
    torch.manual_seed(0)
    model = stack(6, 8, 3).double()
    with torch.no_grad():
        model[2].weight[:, 0] *= 1e-40
    pathsgd.balance(model)
    norms = torch.cat([model[0].weight, model[0].bias[:, None]], 1).norm(dim=1)
    assert norms[0].item() == pytest.approx(2.0**-20 * norms.mean().item(), rel=1e-6)


def test_a_network_without_units_or_without_live_paths_stays():
    for model in (nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Sigmoid())):
        before = copy.deepcopy(model)
        pathsgd.balance(model, torch.ones(1, 3))
        assert are_equal(model, before)


@pytest.mark.parametrize(
    ("name", "most"), [("depth 60", 60), ("squares", 60), ("loud recurrence", 40), ("depthwise", 200)]
)
def test_it_converges_in_few_rounds(name, most, monkeypatch):
    model, _, graph = build(name)
    rounds = []
    measure = least_mu._Solver._measure
    monkeypatch.setattr(least_mu._Solver, "_measure", lambda *a: (rounds.append(1), measure(*a))[1])
    pathsgd.balance(copy.deepcopy(model), graph)
    assert len(rounds) <= most


# These tests can fail.


def test_without_the_exponents_bits_differ(monkeypatch):
    find = least_mu._find_exponents
    monkeypatch.setattr(least_mu, "_find_exponents", lambda *a: (torch.zeros_like(find(*a)[0]), find(*a)[1]))
    different = []
    for name in (cases.Mlp, networks.SmallResNet, networks.Transformer):
        model, _, graph = build(name)
        copies = [copy.deepcopy(model), rescaled(model, graph, "powers of two", 8)]
        for m in copies:
            pathsgd.balance(m, graph)
        different.append(not are_equal(*copies))
    assert any(different)


def test_without_a_norm_for_classes_before_zeros_copies_stay_apart(monkeypatch):
    monkeypatch.setattr(least_mu._Solver, "_settle_others", lambda self, t: t)
    model, _, graph = build("LoRA")
    other = rescaled(model, graph, "log-normal")
    model = copy.deepcopy(model)
    for m in (model, other):
        pathsgd.balance(m, graph)
    assert largest_difference(model, other) > 1e-3


def test_factors_are_applied_in_range():
    """Each alone is out of the range of floats, their quotient is not."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False)).double()
    graph = pathsgd.trace(model)
    units = unit_classes_of(graph)
    before = model[2].weight.detach().clone()
    exponent = torch.full((units.count,), 3000)
    exponent[FIXED] = 2998
    ClassFactors(torch.ones(units.count, dtype=torch.float64), exponent).scale_(
        model[2].weight, units.parameters["2.weight"]
    )
    assert torch.equal(model[2].weight, before / 4)
