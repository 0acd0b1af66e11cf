"""Relations between factors: all rescalings that a network has by hand are found, and no others."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import pathsgd
from pathsgd.graph.unit_classes import unit_classes_of
from support.old_torch import needs_torch
from support.starts import build, traced
from support.symmetries import NETWORKS, Attention, StoredWithoutOne
from support.training import train, weights


@pytest.mark.parametrize("network", NETWORKS)
def test_all_rescalings_are_found_and_no_others(network):
    model, x = build(network)
    planted, expected = model.find_rescalings(), model(x)
    for rescaling in planted:
        rescaled = copy.deepcopy(model)
        rescaling.apply(rescaled, 3.0)
        assert torch.allclose(rescaled(x), expected, rtol=1e-10)  # the hand is right
        assert pathsgd.rescaling_equivalent(model, rescaled, traced(network))
    assert len(unit_classes_of(traced(network)).free) == len(planted)


@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_no_rescaling_is_none(network):
    model, _ = build(network)
    rescaling = model.find_rescalings()[0]
    rescaling.entries.pop()
    rescaling.apply(other := copy.deepcopy(model), 3.0)
    assert not pathsgd.rescaling_equivalent(model, other, traced(network))


needs_vmap = needs_torch(2, 11, "export of torch.vmap, which flex attention uses")


@needs_vmap
def test_flex_attention_as_any_other():
    class Flexible(Attention):
        def forward(self, x):
            q, k = self.split(self.q(x), 4), self.split(self.k(x), 2)
            mixed = flex_attention(q, k, self.split(self.v(x), 2), enable_gqa=True)
            return self.out(mixed.transpose(1, 2).flatten(2))

    units = unit_classes_of(pathsgd.trace(Flexible(), torch.ones(1, 3, 5)))
    assert len(units.free) == 8 + 8  # of keys (nothing turns them here), and of values


@needs_vmap
def test_a_function_under_vmap_is_no_error():
    class Mapped(torch.nn.Linear):
        def forward(self, x):
            return torch.vmap(lambda row: row.relu().clone().mul_(2))(super().forward(x))

    assert "_add_batch_dim" in str(pathsgd.trace(Mapped(2, 2), torch.ones(3, 2)))


def test_the_error_of_an_old_torch_under_vmap_says_which_torch_will_do(monkeypatch):
    class Mapped(torch.nn.Linear):
        def forward(self, x):
            raise RuntimeError("NYI: querying is_contiguous inside of vmap for memory_format other than ...")

    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.6.0"))
    with pytest.raises(pathsgd.TraceError, match=r"flex attention need torch 2\.11 or newer .*, not 2\.6"):
        pathsgd.trace(Mapped(2, 2), torch.ones(3, 2))


# Gains that are stored without their 1


def test_a_gain_without_its_one_is_rescaled_with_it():
    model, x = build(StoredWithoutOne)
    graph, before = pathsgd.trace(model, x), model(x)
    generator = torch.Generator().manual_seed(0)
    pathsgd.unbalance(other := copy.deepcopy(model), graph, units=30, factor=1.0, generator=generator)
    assert (other.gain - model.gain).abs().min() > 0.1
    assert pathsgd.rescaling_equivalent(model, other, graph)
    models = [model, other]
    optimizers = [pathsgd.BalancedMuon(each, graph) for each in models]
    for steps in (0, 4, 20):  # more than are between two rounds
        for each, optimizer in zip(models, optimizers, strict=True):
            train(each, optimizer, x, steps)
        for a, b in zip(*map(weights, models), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)
        pathsgd.unbalance(other, graph, units=10, factor=1.0, generator=generator)  # is undone
    assert (model(x) - before).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gain_that_has_lost_digits_is_recognised(dtype):
    """A thousandth of 1 + weight has three digits less than weight has."""
    model, x = build(StoredWithoutOne)
    model, x = model.to(dtype), x.to(dtype)
    graph = pathsgd.trace(model, x)
    optimizer = pathsgd.BalancedMuon(model, graph)
    train(model, optimizer, x, 2)
    before = copy.deepcopy(model)
    pathsgd.rescale(model, graph, {("gain", 1): 1e-3})
    assert pathsgd.rescaling_equivalent(before, model, graph)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, x, 1)  # undoes it
    digits = 1e4 * torch.finfo(dtype).eps
    assert torch.allclose(model.gain, before.gain, rtol=0, atol=digits)
    with torch.no_grad():
        model.gain[1] += 0.01
    assert not pathsgd.rescaling_equivalent(before, model, graph)


def test_mu_counts_a_gain_with_its_one():
    model, x = build(StoredWithoutOne)
    graph = pathsgd.trace(model, x)
    least = pathsgd.balance(model, graph)
    acting = [p + 1 if name == "gain" else p for name, p in model.named_parameters() if name != "norm.weight"]
    assert math.isclose(least**2, sum(float(p.detach().square().sum()) for p in acting), rel_tol=1e-12)
    assert math.isclose(pathsgd.imbalance(model, graph).ratio, 1, rel_tol=1e-12)


def test_a_gain_of_16_bits_stays():
    """It could not hold the sum, whatever the factor."""
    model, x = build(StoredWithoutOne)
    graph = pathsgd.trace(model, x)
    model, x = model.bfloat16(), x.bfloat16()
    assert not unit_classes_of(pathsgd.trace(model, x)).shifts
    with pytest.raises(pathsgd.PathError, match="'gain' had more bits when the model was traced"):
        pathsgd.balance(model, graph)


def test_w_and_1_minus_w_are_two_numbers():
    class Mixed(StoredWithoutOne):
        def forward(self, x):
            x = self.norm(x)
            return self.down(x.new_ones(6) * self.up(x * self.gain + x.flip(0) * (1 - self.gain)))

    model, x = build(Mixed)
    units = unit_classes_of(pathsgd.trace(model, x))
    assert not units.shifts
    assert len(units.free) == 5 + 6  # the norm's gain against the layer behind it, past a weight that stays
