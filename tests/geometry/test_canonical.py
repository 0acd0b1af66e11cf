"""The factors of the canonical equivalent against sums over listed paths; its weights are invariant."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import pathsgd
from pathsgd.geometry.canonical import LEAST, measure_unit_factors
from pathsgd.geometry.extended_float import exact_ldexp
from pathsgd.geometry.range_check import measure_in_range
from pathsgd.geometry.rescale import apply_factors
from pathsgd.graph.unit_classes import FIXED, unit_classes_of
from support.cases import CASES, RESCALABLE, Concatenated, build, traced

ORDERS = (1, 2, math.inf)


def pair(case, dtype=torch.float64):
    return build(case).to(dtype), traced(case)


def plain(value):
    return value.mantissa if value.exponent is None else exact_ldexp(value.mantissa, value.exponent)


@torch.no_grad()
def measure(graph, model, p=2, exponents=None):
    """(factors, magnitudes) by class, as floats."""
    found = measure_in_range(graph, graph.tensors(model), p, measure_unit_factors, exponents)
    return plain(found.factor), plain(found.magnitude)


def z_of(graph, model, p=2, exponents=None):
    """The weights of the canonical equivalent, by name."""
    factor, _ = measure(graph, model, p, exponents)
    edges = unit_classes_of(graph).parameters
    return {
        name: w.detach() * factor[edges[name].head] / factor[edges[name].tail] ** edges[name].degree
        for name, w in model.named_parameters()
    }


def mean(values, p):
    """The l_p mean: values are sums over paths of powers already."""
    return max(values) if math.isinf(p) else (sum(values) / len(values)) ** (1 / p)


def oracle_norms(model, graph, p):
    """{class: (a_in, a_out)}, over all units that weights of the class read, by listing paths."""
    net, dag = model.oracle()
    gamma_in, gamma_out = dag.gamma_in(p), dag.gamma_out(p)
    edges = unit_classes_of(graph).parameters

    def before_activation(unit):
        unit = unit.split("=>")[0]
        while unit in net.rectified:
            ((unit, _),) = [edge for edge in net.weights if edge[1] == unit]
        return unit

    places = {}
    for (tail, _), label in net.labels.items():
        unit_class = int(edges[label.name].tail.expand(label.shape)[label.index])
        if unit_class != FIXED:
            places.setdefault(unit_class, set()).add(before_activation(tail))
    return {
        unit_class: (mean([gamma_in[u] for u in units], p), mean([gamma_out[u] for u in units], p))
        for unit_class, units in places.items()
    }


@pytest.mark.parametrize("case", RESCALABLE)
@pytest.mark.parametrize("p", ORDERS)
def test_factors_are_those_of_listed_paths(case, p):
    model, graph = pair(case)
    expected = oracle_norms(model, graph, p)
    assert set(expected) == set(range(1, unit_classes_of(graph).count))
    factor, magnitude = measure(graph, model, p)
    assert factor[FIXED] == magnitude[FIXED] == 1
    for unit, (a_in, a_out) in expected.items():
        if a_in and a_out:
            np.testing.assert_allclose(factor[unit].item(), math.sqrt(a_out / a_in), rtol=1e-10)
            np.testing.assert_allclose(magnitude[unit].item(), math.sqrt(a_out * a_in), rtol=1e-10)


@pytest.mark.parametrize("case", RESCALABLE)
@pytest.mark.parametrize("p", ORDERS)
def test_exponents_change_no_bit(case, p):
    model, graph = pair(case, torch.float32)
    for with_exponents, without in zip(
        measure(graph, model, p, True), measure(graph, model, p, False), strict=True
    ):
        assert torch.equal(with_exponents, without)


@pytest.mark.parametrize("case", RESCALABLE)
@pytest.mark.parametrize("p", ORDERS)
def test_its_weights_are_invariant(case, p):
    model, graph = pair(case)
    before, invariant = z_of(graph, model, p), measure(graph, model, p)[1]
    rescaled = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    factors = torch.exp(
        4 * torch.randn(unit_classes_of(graph).count, generator=generator, dtype=torch.float64)
    )
    apply_factors(graph.tensors(rescaled), unit_classes_of(graph), factors)
    after = z_of(graph, rescaled, p)
    for name, z in before.items():
        torch.testing.assert_close(after[name], z, rtol=1e-12, atol=0)
    torch.testing.assert_close(measure(graph, rescaled, p)[1], invariant, rtol=1e-12, atol=0)
    assert any(
        not torch.allclose(a, b) for a, b in zip(model.parameters(), rescaled.parameters(), strict=True)
    )


@pytest.mark.parametrize("case", RESCALABLE)
def test_powers_of_two_change_no_bit(case):
    """Also where one copy needs exponents."""
    model, graph = pair(case, torch.float32)
    before = z_of(graph, model)
    generator = torch.Generator().manual_seed(0)
    count = unit_classes_of(graph).count
    for size in (8, 40):
        rescaled = copy.deepcopy(model)
        factors = torch.exp2(torch.randint(-size, size + 1, (count,), generator=generator).double())
        apply_factors(graph.tensors(rescaled), unit_classes_of(graph), factors)
        after = z_of(graph, rescaled)
        assert all(torch.equal(after[name], z) for name, z in before.items())


@pytest.mark.parametrize("case", RESCALABLE)
def test_the_canonical_equivalent_is_its_own(case):
    """Rescaled by the factors found, all factors are 1: as much arrives as leaves."""
    model, graph = pair(case)
    factor, magnitude = measure(graph, model)
    apply_factors(graph.tensors(model), unit_classes_of(graph), factor)
    again, same = measure(graph, model)
    torch.testing.assert_close(again, torch.ones_like(again), rtol=1e-12, atol=0)
    torch.testing.assert_close(same, magnitude, rtol=1e-12, atol=0)


class Squares(nn.Module):
    def forward(self, x):
        return x.relu().square()


@pytest.mark.parametrize("p", [1, 2])
def test_squared_activations(p):
    """A rescaling by s multiplies what arrives over squares by s^2: the factor is a fourth root."""
    model = nn.Sequential(nn.Linear(3, 4), Squares(), nn.Linear(4, 2)).double()
    graph = pathsgd.trace(model)
    a_in = (model[0].weight.abs() ** p).sum(1) + model[0].bias.abs() ** p
    a_out = (model[2].weight.abs() ** p).sum(0)
    factor, _ = measure(graph, model, p)
    heads = unit_classes_of(graph).parameters["0.weight"].head.flatten()
    # The square of a sum over paths, then roots: of order p, of the ratio, of the square.
    expected = ((a_out / a_in.square()) ** (1 / p)).sqrt().sqrt()
    torch.testing.assert_close(factor[heads], expected.detach(), rtol=1e-12, atol=0)
    before = z_of(graph, model, p)
    pathsgd.rescale(model, graph, {"0": torch.tensor([1e-3, 0.5, 7.0, 1e4])})
    for name, z in z_of(graph, model, p).items():
        torch.testing.assert_close(z, before[name], rtol=1e-12, atol=0)


def test_means_over_places():
    """A channel's norms are l_2 means over the places its weights read: all of them, padding or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 1, bias=False), nn.ReLU(), nn.Conv1d(2, 1, 2, bias=False)).double()
    graph = pathsgd.trace(model, torch.zeros(1, 1, 3))
    a_in = model[0].weight.flatten().square()
    first, second = model[2].weight[0].unbind(1)  # the places are read by: tap 0, both taps, tap 1
    a_out = (first.square() + (first.square() + second.square()) + second.square()) / 3
    factor, _ = measure(graph, model)
    heads = unit_classes_of(graph).parameters["0.weight"].head.flatten()
    torch.testing.assert_close(factor[heads], (a_out / a_in).detach() ** 0.25, rtol=1e-12, atol=0)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)).double()


def norms(model):
    return model[0].weight.detach().norm(dim=1), model[2].weight.detach().norm(dim=0)


@pytest.mark.parametrize("exponents", [False, True])
def test_units_that_no_path_passes_take_the_magnitude_of_their_layer(exponents):
    model = mlp()
    with torch.no_grad():
        model[0].weight[0] = 0
        model[2].weight[:, 1] = 0
        model[0].weight[2], model[2].weight[:, 2] = 0, 0
    graph = pathsgd.trace(model)
    a_in, a_out = norms(model)
    factor, magnitude = (found[1:] for found in measure(graph, model, 2, exponents))
    live = (a_in[3] * a_out[3]).sqrt()
    torch.testing.assert_close(magnitude, live.expand(4), rtol=1e-12, atol=0)
    expected = torch.stack([a_out[0] / live, live / a_in[1], torch.ones_like(live), live / a_in[3]])
    torch.testing.assert_close(factor, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("exponents", [False, True])
def test_a_network_of_zeros_has_factors_of_one(exponents):
    model = mlp()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    for found in measure(pathsgd.trace(model), model, 2, exponents):
        assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("size", [2.0**-60, 2.0**-400])
def test_a_unit_that_few_paths_use_counts_as_a_share_of_its_layer(size):
    model = mlp()
    with torch.no_grad():
        model[2].weight[:, 0] *= size
    a_in, a_out = norms(model)
    factor, magnitude = (found[1:] for found in measure(pathsgd.trace(model), model))
    through = (a_in * a_out).sqrt()
    least = 2.0**-LEAST * through.mean()
    assert through[0] < least
    torch.testing.assert_close(magnitude, torch.cat([least[None], through[1:]]), rtol=1e-12, atol=0)
    torch.testing.assert_close(factor, magnitude / a_in, rtol=1e-12, atol=0)


def test_a_unit_that_is_sliced_off_has_no_factor():
    """No weight reads it: nothing would be divided by its factor."""
    heads = unit_classes_of(traced(Concatenated)).parameters["b.weight"].head.flatten()
    assert (heads == FIXED).tolist() == [True, True, False, False]


def test_the_other_cases_have_no_unit_to_rescale():
    assert all((unit_classes_of(traced(case)).count > 1) == (case in RESCALABLE) for case in CASES)
