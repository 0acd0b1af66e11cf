"""A network and its rescaled copy take the same relative steps."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from pathsgd.geometry.rescale import apply_factors
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import PathAdam, PathMuon
from pathsgd.graph.unit_classes import unit_classes_of
from support import cases, networks

both = pytest.mark.parametrize("make", [PathAdam, PathMuon])


class Biased(nn.Sequential):
    """A convolution's bias before batch norm: its gradient is zero, but for rounding."""

    example = (8, 2, 6, 6)

    def __init__(self):
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip


OTHERS = [networks.Recurrent, networks.Transformer, networks.PreActivation, Biased]


@functools.cache
def traced(network):
    return cases.traced(network) if network in cases.CASES else pathsgd.trace(*build(network))


def build(network, dtype=torch.float64):
    """(model, a batch)."""
    if network in cases.CASES:
        model = cases.build(network)
        x = model.example(4)
        x = torch.arange(x.numel()).reshape(x.shape) % 3 if x.dtype == torch.int64 else x.to(dtype)
        return model.to(dtype).eval(), x
    model, x = networks.build(network, dtype)
    return model.train(network is Biased), x


def rescaled(model, graph, exponent, powers_of_two):
    """A copy with every unit times 2 to the power of up to +-exponent."""
    units = unit_classes_of(graph)
    drawn = torch.rand(units.count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = exponent * (2 * drawn - 1)
    factors = torch.exp2(drawn.round() if powers_of_two else drawn)
    copied = copy.deepcopy(model)
    apply_factors(graph.tensors(copied), units, factors)
    return copied


def train(model, optimizer, x, steps):
    """The outputs before and after, in one vector."""

    def outputs():
        found = model(x)
        return torch.cat(
            [y.reshape(len(y), -1) for y in (found if isinstance(found, tuple) else (found,))], 1
        )

    start = outputs().detach()
    for _ in range(steps):
        optimizer.zero_grad()
        y = outputs()
        F.cross_entropy(y, torch.arange(len(y)) % y.shape[1]).backward()
        optimizer.step()
    return start, outputs().detach()


def difference(network, make, steps=10, **options):
    """Of the outputs of both copies after training, relative to how far training moved them."""
    graph = traced(network)
    model, x = build(network)
    ends = []
    for m in (model, rescaled(model, graph, 9, powers_of_two=False)):
        start, end = train(m, make(m, graph, **options), x, steps)
        ends.append(end)
    movement = (ends[0] - start).norm()
    assert movement > 1e-3 * start.norm()
    return ((ends[0] - ends[1]).norm() / movement).item()


@both
@pytest.mark.parametrize("network", [*cases.RESCALABLE, *OTHERS])
def test_a_rescaled_copy_takes_the_same_steps(network, make):
    assert difference(network, make) <= 1e-9


@both
@pytest.mark.parametrize("options", [{"p": 1}, {"weight_decay": 0.1}, {"growth": 0.0}, {"refresh_every": 3}])
def test_with_every_option(make, options):
    assert difference(cases.Residual, make, **options) <= 1e-9


@both
@pytest.mark.parametrize("network", [*cases.RESCALABLE, *OTHERS[:3]])
def test_powers_of_two_give_the_same_bits(network, make):
    """Also when one copy needs exponents and the other does not."""
    graph = traced(network)
    model, x = build(network, torch.float32)
    copies = copy.deepcopy(model), rescaled(model, graph, 36, powers_of_two=True)
    ends = [train(m, make(m, graph), x, 4)[1] for m in copies]
    assert torch.isfinite(ends[0]).all()
    assert torch.equal(*ends)


def test_one_of_the_copies_needed_exponents():
    graph = traced(cases.Mlp)
    model, _ = build(cases.Mlp, torch.float32)
    needed = []
    for m in (model, rescaled(model, graph, 36, powers_of_two=True)):
        optimizer = PathAdam(m, graph)
        measurement = optimizer._relative.measurement()
        needed.append(optimizer.gamma_cache.get(measurement, 2).exponents)
    assert needed == [False, True]


@both
@pytest.mark.parametrize("network", [cases.Mlp, cases.ConvPool, networks.Transformer])
def test_the_same_form_on_weights_is_not_invariant(network, make):
    """So that the tests above can fail."""
    assert difference(network, make, coordinates="weights") > 1e-2


@both
def test_state_survives_a_rescaling_in_the_middle(make):
    graph = traced(networks.PreActivation)
    model, x = build(networks.PreActivation)
    other = copy.deepcopy(model)
    optimizers = [make(m, graph) for m in (model, other)]
    for m, optimizer in zip((model, other), optimizers, strict=True):
        train(m, optimizer, x, 4)
    pathsgd.rescale(other, graph, {"up.1": torch.tensor([1e-3, 1.0, 5.0, 1e3, 2.0, 0.1, 30.0])})
    ends = [train(m, o, x, 4)[1] for m, o in zip((model, other), optimizers, strict=True)]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)
