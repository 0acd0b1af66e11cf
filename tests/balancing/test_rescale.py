"""rescale, unbalance and balance leave the function as it is, on networks people train."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.graph.unit_classes import unit_classes_of
from pathsgd.graph.unit_groups import find_unit_groups
from support.networks import NETWORKS, Mlp, PreActivation, Recurrent, SmallResNet, UNet, Vgg, build, traced

ONE_REGION = [n for n in NETWORKS if n.__name__ != "Transformer"]


def difference(a, b):
    return ((a - b).abs().max() / a.abs().max()).item()


def invariants(model, graph, p=2):
    """w^2 gamma of every edge, in one vector."""
    result = measure_gammas(graph, graph.tensors(model), p)
    return torch.cat([(w.detach() ** 2 * result[n].dense()).flatten() for n, w in model.named_parameters()])


@pytest.mark.parametrize("network", NETWORKS)
def test_unbalance_and_balance_keep_the_function(network):
    model, x = build(network)
    graph = traced(network)
    identities = [id(parameter) for parameter in model.parameters()]
    before, edges = model(x).detach(), invariants(model, graph)
    # Rescalings pass products of activations, as of queries and keys; paths end there.
    follow = not graph.passed
    original = copy.deepcopy(model)

    pathsgd.unbalance(
        model, graph, units=unit_classes_of(graph).count, generator=torch.Generator().manual_seed(0)
    )
    assert difference(before, model(x)) <= 1e-10
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
    assert torch.allclose(invariants(model, graph), edges, rtol=1e-10, atol=1e-300) == follow
    assert pathsgd.rescaling_equivalent(original, model, graph)

    for p in (1, 2, math.inf):
        reached = pathsgd.balance(model, graph, p, q=math.inf)
        assert difference(before, model(x)) <= 1e-10
        assert reached == pytest.approx(pathsgd.group_norm(model, graph, p).item(), rel=1e-12)
        assert torch.allclose(invariants(model, graph), edges, rtol=1e-10, atol=1e-300) == follow
        balanced = [parameter.clone() for parameter in model.parameters()]
        pathsgd.balance(model, graph, p, q=math.inf)
        assert all(map(torch.equal, balanced, model.parameters()))
    assert identities == [id(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize("network", ONE_REGION)
def test_phi_is_unchanged(network):
    model, _ = build(network)
    graph = traced(network)
    for p in (1, 2, 3, math.inf):
        before = pathsgd.path_norm(model, graph, p).item()
        pathsgd.unbalance(model, graph)
        assert pathsgd.path_norm(model, graph, p).item() == pytest.approx(before, rel=1e-10)


def test_a_rescaling_that_forgets_the_bias_is_noticed():
    model, x = build(Mlp)
    before = model(x).detach()
    with torch.no_grad():
        model[0].weight[3] *= 2
        model[2].weight[:, 3] /= 2
    assert difference(before, model(x)) > 1e-3


@pytest.mark.parametrize(
    ("network", "p"),
    [
        (Mlp, 1),
        (Mlp, 3),
        (Vgg, 2),
        (PreActivation, 3),
        (Recurrent, 1),
        (Recurrent, 2),
        (UNet, 2),
    ],
)
def test_balance_reaches_the_minimum_an_optimiser_finds(network, p):
    """log mu is convex in the log-factors, so that descent on a smoothed maximum finds the minimum."""
    model, _ = build(network)
    graph = traced(network)
    units = unit_classes_of(graph)
    logs = torch.zeros(units.count, dtype=torch.float64, requires_grad=True)
    families = []
    for group in find_unit_groups(graph):
        parts = [
            (q.rows(graph.tensors(model), torch.float64).detach().abs(), q.tails(units)) for q in group.parts
        ]
        families.append((group.parts[0].heads(units), parts))

    def unit_norms():
        free = torch.cat([torch.zeros(1, dtype=torch.float64), logs[1:]])
        result = []
        for heads, parts in families:
            sums = sum(
                (weights * torch.exp(free[heads][:, None] - free[tails])).pow(p).sum(1)
                for weights, tails in parts
            )
            result.append(sums.clamp(min=1e-300).log() / p)
        return torch.cat(result)

    for sharpness in (30, 1000, 10000):
        optimizer = torch.optim.LBFGS([logs], max_iter=200, line_search_fn="strong_wolfe", history_size=20)

        def closure(sharpness=sharpness, optimizer=optimizer):
            optimizer.zero_grad()
            loss = torch.logsumexp(sharpness * unit_norms(), 0) / sharpness
            loss.backward()
            return loss

        optimizer.step(closure)
    result = unit_norms().max().exp().item()
    reached = pathsgd.balance(model, graph, p, q=math.inf)
    assert reached <= result * (1 + 1e-12)
    assert reached == pytest.approx(result, rel=2e-3)


def test_units_are_tied_as_the_network_ties_them():
    model, x = build(SmallResNet)
    units = unit_classes_of(pathsgd.trace(model, x))
    owners = units.owners
    # A stream: the stem's norm and every block's second norm move as one.
    assert torch.equal(owners["stem.1"], owners["stages.0.norm2"])
    assert torch.equal(owners["stages.1.norm2"], owners["stages.1.shortcut.1"])
    assert not set(owners["stages.1.norm1"].tolist()) & set(owners["stages.1.norm2"].tolist())
    # What batch norm normalises cannot be rescaled, nor can outputs.
    assert not owners["stages.0.conv1"].any()
    assert not owners["head"].any()
    model, x = build(Recurrent)
    owners = unit_classes_of(pathsgd.trace(model, x)).owners
    assert torch.equal(owners["rnn.weight_ih_l0"], owners["rnn.weight_hh_l0"])
    assert owners["rnn.weight_ih_l0"].all()
    assert "rnn" not in owners


def test_rescale_by_name_and_by_vector():
    model, x = build(Vgg)
    before = model(x).detach()
    pathsgd.rescale(model, x, {("0", 1): 8.0, "2": torch.full((6,), 0.25), ("6", 0): 3.0, ("10", 5): 1e-3})
    assert difference(before, model(x)) <= 1e-10
    model, x = build(Recurrent)
    before = model(x).detach()
    pathsgd.rescale(model, x, {("rnn.weight_hh_l0", 2): 5.0, ("rnn.bias_ih_l1", 0): 0.1})
    assert difference(before, model(x)) <= 1e-10


def test_powers_of_two_are_exact_in_fp32():
    model, x = build(SmallResNet, torch.float32)
    graph = pathsgd.trace(model, x)
    before, phi = model(x).detach(), pathsgd.path_norm(model, graph)
    edges = invariants(model, graph)
    owners = unit_classes_of(graph).owners
    generator = torch.Generator().manual_seed(0)
    chosen = {
        (name, k): 2.0 ** int(torch.randint(-10, 11, (), generator=generator))
        for name in ("stages.0.norm1", "stages.1.norm1", "stages.3.norm2") for k in range(len(owners[name]))
    }  # fmt: skip
    pathsgd.rescale(model, graph, chosen)
    assert torch.equal(before, model(x))
    assert torch.equal(phi, pathsgd.path_norm(model, graph))
    assert torch.equal(edges, invariants(model, graph))


def test_unbalance_is_the_papers():
    """2000 picks of 8000 with replacement: about a fifth of the units touched, by factors around 10."""
    model = nn.Sequential(
        nn.Linear(2, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 2)
    ).double()
    original = copy.deepcopy(model)
    pathsgd.unbalance(model, units=200, generator=torch.Generator().manual_seed(1))
    proof = pathsgd.rescaling_equivalent(original, model)
    factors = torch.cat([proof.factors["0"], proof.factors["2"]])
    touched = factors[(factors - 1).abs() > 1e-6]
    assert 160 <= len(touched) <= 200
    assert 8 < touched.log().median().exp() < 13
    again = copy.deepcopy(original)
    pathsgd.unbalance(again, units=200, generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_balance_leaves_dead_units_alone():
    model, x = build(Mlp)
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2] = 0, 0
        model[2].weight[:, 4] = 0
    before = model(x).detach()
    pathsgd.balance(model, x, q=math.inf)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert difference(before, model(x)) <= 1e-10
    assert not model[0].weight[2].any()


def test_squared_relu():
    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(x).relu() ** 2)

    model, x = Squared().double(), torch.randn(5, 3).double()
    before, phi = model(x).detach(), pathsgd.path_norm(model, x)
    pathsgd.rescale(model, x, {("a", 1): 3.0, ("a", 2): 0.1})
    assert difference(before, model(x)) <= 1e-10
    assert pathsgd.path_norm(model, x).item() == pytest.approx(phi.item(), rel=1e-10)
    assert difference(before, model(x)) <= 1e-10
    # phi_1 of a network of squares, by hand: sum |b| (sum |a| + |bias|)^2 + |bias|
    a = model.a.weight.abs().sum(1) + model.a.bias.abs()
    expected = (model.b.weight.abs() @ a**2 + model.b.bias.abs()).sum().item()
    assert pathsgd.path_norm(model, x, p=1).item() == pytest.approx(expected, rel=1e-12)
    reached = pathsgd.balance(model, x, q=math.inf)
    assert reached == pytest.approx(pathsgd.group_norm(model, x).item(), rel=1e-12)
    assert difference(before, model(x)) <= 1e-10


def test_unbalancing_by_powers_of_two_rounds_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))
    other = copy.deepcopy(model)
    pathsgd.unbalance(other, generator=torch.Generator().manual_seed(1), powers_of_two=True)
    ratio = other[0].weight / model[0].weight
    assert torch.equal(ratio.log2(), ratio.log2().round())
    assert len(ratio[:, 0].unique()) > 3
    x = torch.randn(20, 6)
    assert torch.equal(model(x), other(x))
