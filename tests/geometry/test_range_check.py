"""Plain floats where they are enough, and only there: against exponents, at the edges of the range."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import pathsgd
from benchmarks.networks import Bottleneck, ResNet
from pathsgd.geometry import range_check
from pathsgd.geometry.canonical import measure_unit_factors
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.geometry.passes import powered_network
from pathsgd.geometry.range_check import RangeCheck, has_room, measure_in_range
from pathsgd.optim.gamma_cache import GammaCache

LARGEST_ERROR = 1e-5
"""Of a binary logarithm."""


@torch.no_grad()
def measure_both(graph, tensors, p=2.0):
    """gamma as it is measured by default, compared with exponents; whether plain floats were taken."""
    found = measure_gammas(graph, tensors, p)
    exact = measure_gammas(graph, tensors, p, exponents=True)
    for name, gamma in found.items():
        torch.testing.assert_close(
            gamma.log2(), exact[name].log2(), rtol=0, atol=LARGEST_ERROR, msg=lambda m, n=name: f"{n}: {m}"
        )
        weight = torch.exp2(-gamma.log2() / 2).to(gamma.dtype)  # so that z is 1
        z, expected = gamma.weight_to_z(weight), exact[name].weight_to_z(weight)
        torch.testing.assert_close(z, expected, rtol=LARGEST_ERROR, atol=0, equal_nan=True)
        h, expected = gamma.gradient_to_z(1 / weight), exact[name].gradient_to_z(1 / weight)
        torch.testing.assert_close(h, expected, rtol=LARGEST_ERROR, atol=0, equal_nan=True)
    return not found.exponents


@torch.no_grad()
def log2_factors(graph, tensors, p, exponents):
    mantissa, exponent = measure_in_range(graph, tensors, p, measure_unit_factors, exponents).factor
    return mantissa.double().log2() + (0 if exponent is None else exponent)


@functools.cache
def convolutions():
    """Four convolutions with batch norms, and a linear layer."""
    torch.manual_seed(0)
    layers = []
    for k in range(4):
        layers += [nn.Conv2d(2 if k else 1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU()]
        nn.init.ones_(layers[-2].bias)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * 9, 2)).requires_grad_(False)
    return model, pathsgd.trace(model, torch.zeros(1, 1, 3, 3))


scale = st.just(0) | st.just(0) | st.integers(-75, 60)
four = st.lists(scale, min_size=4, max_size=4)
none = [0, 0, 0, 0]


@settings(max_examples=25)
@given(
    p=st.sampled_from([1.0, 2.0, 4.0]), convs=four, units=four, norms=four, sigmas=four, head=scale,
    dead=st.booleans(),
)  # fmt: skip
# gamma_in and gamma_out are both large, and their product is larger.
@example(p=2.0, convs=[40, 0, 0, 0], units=none, norms=none, sigmas=none, head=45, dead=False)
# The squares of weights are subnormal numbers, and what is multiplied by them is large.
@example(p=2.0, convs=[30, -67, 0, 0], units=none, norms=none, sigmas=none, head=30, dead=False)
# The weight of a norm makes up for its variance, but does not enter its own gamma.
@example(p=2.0, convs=none, units=none, norms=[0, 60, 0, 0], sigmas=[0, 60, 0, 0], head=-20, dead=False)
def test_whatever_passes_is_right(p, convs, units, norms, sigmas, head, dead):
    model, graph = convolutions()
    tensors = {name: tensor.clone() for name, tensor in graph.tensors(model).items()}
    for k in range(4):
        tensors[f"{3 * k}.weight"] *= 2.0 ** (convs[k] * 2 / p)
        tensors[f"{3 * k}.weight"][0] *= 2.0 ** (units[k] * 2 / p)
        tensors[f"{3 * k + 1}.weight"] *= 2.0 ** (norms[k] * 2 / p)
        tensors[f"{3 * k + 1}.running_var"] *= 2.0 ** min(sigmas[k] * 4 / p, 120)
    tensors["13.weight"] *= 2.0 ** (head * 2 / p)
    if dead:
        tensors["6.weight"][1], tensors["7.weight"][1], tensors["7.bias"][1] = 0, 0, 0
    measure_both(graph, tensors, p)
    found, exact = (log2_factors(graph, tensors, p, exponents) for exponents in (None, True))
    torch.testing.assert_close(found, exact, rtol=0, atol=LARGEST_ERROR)


def test_dead_units_on_both_sides_need_no_exponents():
    model, graph = convolutions()
    tensors = {name: tensor.clone() for name, tensor in graph.tensors(model).items()}
    for name in ("4.weight", "4.bias", "7.weight", "7.bias"):
        tensors[name][1] = 0
    assert measure_both(graph, tensors)
    assert measure_gammas(graph, tensors)["6.weight"].dense()[1, 1].max() == 0


@functools.cache
def three_weights():
    layers = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).requires_grad_(False)
    return model, pathsgd.trace(model)


@pytest.mark.parametrize(
    ("dtype", "p", "inside", "outside"),
    [
        (torch.float32, 2, (50, 0, 0), (51, 0, 0)),  # the largest number: 2^100
        (torch.float32, 1, (60, 0, 0), (61, 0, 0)),
        (torch.float64, 2, (450, 0, 0), (451, 0, 0)),
        (torch.float32, 2, (30, 0, 30), (30, 0, 31)),  # gamma of the second weight: 2^120
        (torch.float64, 2, (250, 0, 250), (250, 0, 251)),
        (torch.float32, 2, (-30, 0, -30), (-31, 0, -30)),  # 2^-120
        (torch.float64, 2, (-250, 0, -250), (-250, 0, -251)),
        (torch.float32, 2, (-45, 0, 0), (-46, 0, 0)),  # a sum, where no number is large: 2^-90
        (torch.float32, 2, (35, 0, -15), (35, 0, -16)),  # and where the largest is 2^70: 2^-30
    ],
)
def test_just_inside_and_just_outside(dtype, p, inside, outside):
    model, graph = three_weights()
    for exponents, plain in ((inside, True), (outside, False)):
        weights = [torch.full((1, 1), 2.0**n, dtype=dtype) for n in exponents]
        assert measure_both(graph, dict(zip(graph.tensors(model), weights, strict=True)), p) == plain


@functools.cache
def residual_network():
    torch.manual_seed(0)
    model = ResNet(width=4, blocks=(3, 4, 6, 3), classes=5, block=Bottleneck).requires_grad_(False).eval()
    return model, pathsgd.trace(model, torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(("variance", "size"), [(0.14, 55), (0.095, 80)])
def test_a_residual_network_with_small_variances(variance, size):
    """gamma_in grows from block to block and gamma_out the other way: their product stays what it is."""
    model, graph = residual_network()
    tensors = graph.tensors(model)
    for name, tensor in tensors.items():
        if name.endswith("running_var"):
            tensor.fill_(variance)
    assert size < max(float(gamma.log2().max()) for gamma in pathsgd.gammas(model, graph).values()) < size + 5
    assert measure_both(graph, tensors)


def test_a_network_in_its_first_steps_needs_no_exponents():
    """Path weights of a ResNet grow to 2^50 while its running variances become those of its activations."""
    torch.manual_seed(0)
    model = ResNet(width=6, blocks=(3, 4, 6, 3), classes=10, block=Bottleneck)
    x, y = torch.randn(10, 3, 32, 32), torch.arange(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    graph = pathsgd.trace(model, x[:1])
    assert max(float(gamma.log2().max()) for gamma in pathsgd.gammas(model, graph).values()) > 45
    assert measure_both(graph, graph.tensors(model))


@pytest.mark.parametrize(("shift", "plain"), [(10, True), (20, True), (30, False), (45, False)])
def test_much_arrives_where_little_leaves(shift, plain):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.ReLU()))).eval()
    graph = pathsgd.trace(model)
    pathsgd.rescale(model, graph, {"2": torch.tensor([1.0] * 5 + [2.0**shift])})
    assert measure_both(graph, graph.tensors(model)) == plain


class Stream(nn.Module):
    """Branches added to one stream, whose units are the same ones from its beginning to its end."""

    def __init__(self, branches=20, width=4):
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(branches))

    def forward(self, x):
        x = self.first(x)
        for branch in self.branches:
            x = x + branch(x.relu())
        return self.last(x)


@torch.no_grad()
@pytest.mark.parametrize(("p", "factor"), [(1.0, 16), (2.0, 6), (math.inf, 900)])
def test_factors_of_units_that_much_arrives_at_late_and_leaves_early(p, factor):
    """They are made of a_in a_out, means over all places of a unit: more than any gamma."""
    torch.manual_seed(0)
    model = Stream()
    for branch in model.branches:
        branch.weight.mul_(factor)
    graph = pathsgd.trace(model, torch.zeros(1, 3))
    found, exact = (log2_factors(graph, graph.tensors(model), p, exponents) for exponents in (None, True))
    torch.testing.assert_close(found, exact, rtol=0, atol=LARGEST_ERROR)


def test_steps_that_cannot_be_checked_are_left_room():
    """A captured step takes plain floats only where path weights may still grow a great deal."""
    model, graph = three_weights()
    cache = GammaCache(model, graph)
    for exponent, plain, room in ((30, True, True), (45, True, False), (60, False, False), (30, True, True)):
        for layer, n in zip(model[::2], (exponent, 0, 0), strict=True):
            layer.weight.fill_(2.0**n)
        assert cache.gammas(2).exponents != plain
        assert cache.needs_exponents[cache.gamma_measurement, 2] != room
        pathsgd.path_norm(model, graph)  # looks at the way there alone
        assert has_room(graph, 2) == room


size = st.just(0.0) | st.just(math.nan) | st.just(math.inf) | st.integers(-130, 60).map(lambda n: 2.0**n)
sizes = st.lists(st.integers(-130, 45).map(lambda n: 2.0**n) | size, min_size=3, max_size=3)


@given(p=st.sampled_from([1.0, 2.0]), least=sizes, largest=sizes)
@example(p=2.0, least=[2.0**-90] * 3, largest=[1.0, 1.0, 2.0**10])
@example(p=2.0, least=[2.0**-90] * 3, largest=[1.0, 1.0, 2.0**11])
@example(p=2.0, least=[2.0**-60] * 3, largest=[1.0, 1.0, 2.0**40])
@example(p=2.0, least=[1.0] * 3, largest=[1.0, 1.0, 2.0**41])
@example(p=2.0, least=[1.0] * 3, largest=[1.0, math.nan, 1.0])
def test_numbers_that_are_far_from_all_bounds_are_not_looked_at_one_by_one(p, least, largest):
    model, graph = three_weights()
    check = RangeCheck(powered_network(graph, graph.tensors(model), p))
    for k, value in check.network.forward(graph.folded.graph.ends):
        check.see(k, value, forward=True)
    found = check.suspects([least, largest])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_check, "_are_between", lambda extremes, bounds: False)
        assert check.suspects([least, largest]) == found
