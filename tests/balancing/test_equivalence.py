"""rescaling_equivalent: the factors between two networks, read off their weights, or why there are none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd.balancing.equivalence import Changes, _compare, agree, join_changes, read_factors
from pathsgd.graph.unit_classes import FIXED, unit_classes_of
from pathsgd.graph.unit_relations import Relations, join_terms
from support import starts
from support.networks import NETWORKS, Mlp, PreActivation, Recurrent, UNet, build, traced


@pytest.mark.parametrize("network", NETWORKS)
def test_its_factors_prove_it(network):
    model, x = build(network)
    other = copy.deepcopy(model)
    pathsgd.unbalance(other, traced(network), units=30)
    proof = pathsgd.rescaling_equivalent(model, other, x)
    assert proof
    pathsgd.rescale(model, traced(network), proof.factors)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("change", [1 + 1e-6, -1.0, 0.0])
@pytest.mark.parametrize("name", ["0.weight", "2.bias", "4.bias"])
def test_one_other_weight_is_noticed(name, change):
    """A parameter in which a sign or a zero has changed is named."""
    model, x = build(Mlp)
    other = copy.deepcopy(model)
    pathsgd.unbalance(other, x)
    other.get_parameter(name).data.view(-1)[0] *= change
    answer = pathsgd.rescaling_equivalent(model, other, x)
    assert not answer
    assert answer.reason.startswith("no factors turn")
    assert change > 0 or name in answer.reason


def test_another_structure_is_noticed():
    model, x = build(Mlp)
    answer = pathsgd.rescaling_equivalent(model, nn.Sequential(nn.Linear(6, 4)).double(), x)
    assert not answer
    assert answer.reason.startswith("the models differ in structure")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neither_model_is_changed(dtype):
    model, x = build(Mlp, dtype)
    other = copy.deepcopy(model)
    pathsgd.unbalance(other, x)
    before = [p.detach().clone() for m in (model, other) for p in m.parameters()]
    assert pathsgd.rescaling_equivalent(model, other, x)
    assert all(map(torch.equal, before, (*model.parameters(), *other.parameters())))


DEAD = [starts.DeadChain, starts.LowRank]
"""Some of their units may have any factor."""


@pytest.mark.parametrize("zeros", ["", "bias", "bias layers.0"])
@pytest.mark.parametrize("network", [Mlp, PreActivation, Recurrent, UNet, starts.Squares, *DEAD])
def test_factors_are_read_as_equations_are_solved(network, zeros):
    """``log |after / before| = t_head - t_tail`` for all weights but zeros, by least squares. Without
    biases units are known by those before them, without a first layer by those behind."""
    model, _ = starts.build(network)
    for name, p in model.named_parameters():
        if any(part in name for part in zeros.split()):
            torch.nn.init.zeros_(p)
    graph = starts.traced(network)
    units = unit_classes_of(graph)
    other = starts.rescaled(model, graph, "log-normal", 6)
    a, b = (dict(m.named_parameters()) for m in (model, other))
    changes = join_changes(
        [_compare(edge, a[n].detach(), b[n].detach()) for n, edge in units.parameters.items()]
    )
    factors = read_factors(changes, units.relations, torch.arange(units.count) == FIXED)
    assert agree(factors, changes, 1e-12)

    used = changes.before != 0
    heads, tails, before, after, _ = (x[used] for x in changes)
    rows, one = torch.arange(len(heads)), torch.ones((), dtype=torch.float64)
    equations = torch.zeros(len(heads), units.count, dtype=torch.float64)
    equations.index_put_((rows, heads), one, accumulate=True)
    equations.index_put_((rows, tails), -one, accumulate=True)
    terms, free = units.relations.terms, units.free
    powers = torch.zeros(units.count, units.count, dtype=torch.float64)
    powers[terms.of, terms.by] = terms.power.double()
    equations = equations @ powers
    logs = (after / before).log2()
    solution = torch.linalg.lstsq(equations[:, free], logs[:, None], driver="gelsd").solution[:, 0]
    t = factors.mantissa.log2() + factors.exponent
    assert t[FIXED] == 0
    torch.testing.assert_close(equations @ t, logs, rtol=0, atol=1e-10)
    if network not in DEAD:
        torch.testing.assert_close(t[free], solution, rtol=0, atol=1e-9)
        drawn = starts.draw_factors("log-normal", units.count, 6)
        torch.testing.assert_close(t[free].exp2(), drawn[free], rtol=1e-9, atol=0)


def test_no_factors_are_read_off_other_weights():
    """Two weights, into a unit and out of it."""
    relations = Relations(2, join_terms([]))
    ends, values = torch.tensor([[1, 0], [0, 1]]), torch.tensor([[2.0, 3.0], [4.0, 1.5]])
    changes = Changes(*ends, *values.double(), torch.zeros(2))
    held = torch.tensor([True, False])
    factors = read_factors(changes, relations, held)
    assert (factors.mantissa * factors.exponent.exp2()).tolist() == [1, 2]
    assert agree(factors, changes, 1e-12)
    for after in ([4.0, -1.5], [0.0, 1.5], [torch.nan, 1.5], [4.0, torch.inf]):
        assert read_factors(changes._replace(after=torch.tensor(after)), relations, held) is None
    others = changes._replace(after=torch.tensor([4.0, 1.6]))
    assert not agree(read_factors(others, relations, held), others, 1e-3)
