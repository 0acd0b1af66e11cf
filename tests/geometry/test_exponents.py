"""With exponents, what is fast finds the bits of what is obvious."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd.geometry.extended_float import DEAD, Arithmetic
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.geometry.operations import contraction, convolution
from pathsgd.geometry.operations.exponent_folding import fold_by_entry, fold_exponents
from pathsgd.geometry.rescale import apply_factors
from pathsgd.graph.unit_classes import unit_classes_of
from support.cases import CASES, build, traced


def draw_factors(count, bits):
    generator = torch.Generator().manual_seed(bits)
    factors = torch.exp2(torch.randint(-bits, bits + 1, (count,), generator=generator).double())
    factors[0] = 1  # what cannot be rescaled
    return factors


def do_as_is_obvious(monkeypatch):
    """An exponent for every unit, folded into every weight, and mantissas in [1, 2^p)."""
    monkeypatch.setattr(contraction, "_contract_in_one_frame", lambda *_: None)
    monkeypatch.setattr(convolution, "_conv_in_one_frame", lambda *_: None)
    for module in (contraction, convolution):
        monkeypatch.setattr(module, "fold_exponents", fold_by_entry)
    monkeypatch.setattr(Arithmetic, "_defers", lambda *_: False)


@torch.no_grad()
@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
@pytest.mark.parametrize("bits", [20, 60])
@pytest.mark.parametrize("case", CASES)
def test_gammas(case, bits, p, monkeypatch):
    graph, model = traced(case), build(case).float()
    tensors, units = graph.tensors(model), unit_classes_of(graph)
    apply_factors(tensors, units, draw_factors(units.count, bits))
    found = measure_gammas(graph, tensors, p, exponents=True)
    do_as_is_obvious(monkeypatch)
    expected = measure_gammas(graph, tensors, p, exponents=True)
    for name in found:
        assert torch.equal(found[name].log2(), expected[name].log2()), name


@torch.no_grad()
@pytest.mark.parametrize("p", [1, 2, 2.5, 3])
@pytest.mark.parametrize("shape", [(40, 7), (40, 7, 3, 3)])
@pytest.mark.parametrize("spread", [10, 60, 120])
def test_folded_weights(spread, shape, p):
    """Of rows and of columns as large and as small as floats are."""
    generator = torch.Generator().manual_seed(spread)
    rows, columns = (
        torch.randint(-spread, spread + 1, (n,), generator=generator, dtype=torch.int32)
        for n in (shape[0], shape[1])
    )
    weight = torch.randn(shape, generator=generator)
    weight[3], weight[:, 2], rows[4:6], columns[5] = 0, 0, torch.tensor([-125, 120], dtype=torch.int32), DEAD
    ones = (1,) * (len(shape) - 2)
    weight = torch.ldexp(weight.double(), rows.reshape(-1, 1, *ones)).float()
    tail = columns.reshape(1, -1, *ones)
    arithmetic = Arithmetic(p, torch.float32, exponents=True)
    edges, head = fold_exponents(arithmetic, weight, tail)
    expected, expected_head = fold_by_entry(arithmetic, weight, tail)
    assert torch.equal(head, expected_head)
    # What is below the range of floats in its row is nothing beside the rest of it.
    torch.testing.assert_close(edges, expected, rtol=0 if p == int(p) else 1e-6, atol=2.0**-50)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, groups=2), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.Flatten(), nn.Linear(150, 3),
    )  # fmt: skip


def large_matrices():
    return nn.Sequential(nn.Linear(9, 1100), nn.ReLU(), nn.Linear(1100, 1400), nn.ReLU(), nn.Linear(1400, 3))


@torch.no_grad()
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("make", "shape", "memory_format"),
    [
        (convolutions, (1, 2, 6, 6), torch.contiguous_format),
        (convolutions, (1, 2, 6, 6), torch.channels_last),
        (large_matrices, (1, 9), torch.contiguous_format),
    ],
)
def test_rescaled_copies_have_the_same_coordinates(make, shape, memory_format, p):
    """To the bit, also where roots are not exact under scaling, and whichever way a layer is computed."""
    torch.manual_seed(0)
    model = make().to(memory_format=memory_format)
    graph = pathsgd.trace(model, torch.zeros(shape))
    tensors, units = graph.tensors(model), unit_classes_of(graph)
    before = measure_gammas(graph, tensors, p, exponents=True)
    z = {name: before[name].weight_to_z(tensors[name]) for name in graph.parameters}
    for bits in (8, 40):
        apply_factors(tensors, units, draw_factors(units.count, bits))
        after = measure_gammas(graph, tensors, p, exponents=True)
        for name, expected in z.items():
            assert torch.equal(after[name].weight_to_z(tensors[name]), expected), name


@torch.no_grad()
@pytest.mark.parametrize("p", [1, 2, 3])
def test_rescaled_copies_have_the_same_logarithm_of_the_norm(p):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6, bias=False) for _ in range(40)]
    for layer in layers:
        layer.weight.mul_(2.0**8)
    model = nn.Sequential(*layers)
    graph = pathsgd.trace(model)
    norm = pathsgd.path_norm(model, graph, p, log=True)
    for bits in range(1, 9):
        units = unit_classes_of(graph)
        apply_factors(graph.tensors(model), units, draw_factors(units.count, bits))
        assert torch.equal(pathsgd.path_norm(model, graph, p, log=True), norm)


class Missed(nn.Module):
    """A weight between a large input and a large output at different places, and between small ones."""

    def __init__(self, expanded):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, 1))
        self.large, self.small = nn.Parameter(torch.tensor(2.0**60)), nn.Parameter(torch.tensor(2.0**-60))
        self.expanded = expanded

    def forward(self, x):
        large = nn.functional.pad(self.large * x, (0, 1))
        if self.expanded:
            both = torch.cat([large, nn.functional.pad(self.small * x, (1, 0))], 1)
            return self.small * nn.functional.conv1d(both, self.weight.expand(1, 2, 1))[..., 1:]
        missed = nn.functional.conv1d(large, self.weight)[..., 1:]
        return self.large * missed + self.small * nn.functional.conv1d(self.small * x, self.weight)


@torch.no_grad()
@pytest.mark.parametrize("expanded", [False, True])
def test_a_zero_does_not_set_the_exponent_of_a_sum(expanded):
    model = Missed(expanded)
    graph = pathsgd.trace(model, torch.zeros(1, 1, 1))
    gamma = measure_gammas(graph, graph.tensors(model), exponents=True)["weight"]
    assert gamma.log2().item() == -240


@torch.no_grad()
@pytest.mark.parametrize("layer", [nn.Linear, lambda *sizes, bias: nn.Conv2d(*sizes, 1, bias=bias)])
def test_a_small_input_of_a_large_weight_is_not_lost(layer):
    """Beside an input of 1 it is below all floats, and the sum of the rest is in range."""
    model = nn.Sequential(*(layer(*sizes, bias=False) for sizes in ((1, 2), (2, 2), (2, 1))))
    for parameter, numbers in zip(model, ([1, 2.0**-81], [2.0**-29, 2.0**63] * 2, [1, 1]), strict=True):
        parameter.weight.copy_(torch.tensor(numbers).reshape(parameter.weight.shape))
    graph = pathsgd.trace(model, torch.zeros(1, 1) if layer is nn.Linear else torch.zeros(1, 1, 1, 1))
    gamma = measure_gammas(graph, graph.tensors(model), exponents=True)["2.weight"]
    assert gamma.log2().flatten().tolist() == pytest.approx([-36, -36])
    assert pathsgd.path_norm(model, graph).item() == pytest.approx(2**-17.5)


@torch.no_grad()
def test_coordinates_of_weights_near_the_end_of_the_range():
    layers = [nn.Linear(2, 2, bias=False) for _ in range(5)]
    for layer, n in zip(layers, (-14, 9, 112, 9, -14), strict=True):
        layer.weight.fill_(2.0**n)
    model = nn.Sequential(*layers)
    graph = pathsgd.trace(model)
    gamma = measure_gammas(graph, graph.tensors(model), 1, exponents=True)["2.weight"]
    assert torch.equal(gamma.weight_to_z(layers[2].weight), torch.full((2, 2), 2.0**106))


def test_vmap_over_the_weights_of_one_layer():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = pathsgd.trace(model)
    tensors = {name: tensor.detach() for name, tensor in graph.tensors(model).items()}
    several = torch.randn(3, 4, 3)

    def measure(weight):
        found = measure_gammas(graph, {**tensors, "0.weight": weight}, exponents=True)
        return found["2.weight"].dense()

    found = torch.func.vmap(measure)(several)
    torch.testing.assert_close(found, torch.stack([measure(weight) for weight in several]))
