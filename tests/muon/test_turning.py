"""A step turns matrices and kernels in z: their norm is what it was, times a growth."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import PathAdam, PathMuon
from pathsgd.geometry.canonical import measure_unit_factors
from pathsgd.geometry.range_check import measure_in_range
from pathsgd.graph.running_statistics import end_at_statistics
from pathsgd.graph.unit_classes import unit_classes_of
from support.networks import Transformer, Vgg

both = pytest.mark.parametrize("make", [PathAdam, PathMuon])


class Mlp(nn.Sequential):
    example = (16, 12)

    def __init__(self):
        super().__init__(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 8))


def build(network, make, **options):
    """(model, batch, optimizer, z): z as a function of the model, at the factors of now."""
    torch.manual_seed(0)
    model = network().double().eval()  # running statistics stay
    x = torch.randn(network.example, dtype=torch.float64)
    optimizer = make(model, x[:1], **options)
    graph = end_at_statistics(optimizer.graph)
    with torch.no_grad():
        factors = measure_in_range(graph, graph.tensors(model), 2, measure_unit_factors)
    assert factors.factor.exponent is None
    factor, edges = factors.factor.mantissa, unit_classes_of(graph).parameters

    def z(name):
        w = model.get_parameter(name).detach()
        if name not in edges:
            return w.clone()
        return w * factor[edges[name].head] / factor[edges[name].tail]

    return model, x, optimizer, z


def step(model, x, optimizer):
    optimizer.zero_grad()
    y = model(x).flatten(1)
    F.cross_entropy(y, torch.arange(len(y)) % y.shape[1]).backward()
    optimizer.step()


def turning(optimizer):
    """(name, block) of the blocks that turn."""
    return [
        (name, block)
        for name, blocks in optimizer._relative.measurement().by_name.items()
        for block in blocks
        if block.turns
    ]


@both
@pytest.mark.parametrize("network", [Mlp, Vgg, Transformer])
def test_without_growth_norms_are_kept(network, make):
    model, x, optimizer, z = build(network, make, growth=0.0)
    blocks = turning(optimizer)
    assert len(blocks) >= 3
    before = [block.of(z(name)) for name, block in blocks]
    step(model, x, optimizer)
    for old, (name, block) in zip(before, blocks, strict=True):
        new = block.of(z(name))
        assert new.norm().item() == pytest.approx(old.norm().item(), rel=1e-6), name
        assert not torch.allclose(new, old, rtol=1e-3), name


@both
def test_growth_is_what_the_radial_gradient_asks_for(make):
    """In the first step the logarithms of the norms of a region move by lr together."""
    model, x, optimizer, z = build(Mlp, make, lr=0.03)
    names = [name for name, _ in turning(optimizer)]
    before = {name: z(name) for name in names}
    weights = {name: model.get_parameter(name).detach().clone() for name in names}
    step(model, x, optimizer)
    for name in names:
        along = (model.get_parameter(name).grad * weights[name]).sum().item()
        expected = math.exp(-math.copysign(0.03 / len(names), along))
        assert z(name).norm().item() == pytest.approx(before[name].norm().item() * expected, rel=1e-6), name


@both
def test_what_has_no_scale_does_not_grow(make, monkeypatch):
    """Before a batch norm <g, u> is rounding, which must not become a step."""

    def change():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8, eps=1e-300), nn.ReLU(), nn.Linear(8, 3)
        ).double()
        x, before = torch.randn(32, 5, dtype=torch.float64), model[0].weight.norm().item()
        optimizer = make(model, x[:1])
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.arange(32) % 3).backward()
            optimizer.step()
        return abs(model[0].weight.norm().item() / before - 1)

    assert change() < 1e-3
    monkeypatch.setattr("pathsgd.optim.relative.growth.NOISE", 0.0)
    assert change() > 1e-2


@both
def test_growth_is_measured_in_units_of_lr(make):
    norms = {}
    for growth in (0.0, 1.0, 4.0):
        model, x, optimizer, z = build(Mlp, make, lr=0.01, growth=growth)
        step(model, x, optimizer)
        norms[growth] = z("2.weight").norm().log().item()
    assert norms[4.0] - norms[0.0] == pytest.approx(4 * (norms[1.0] - norms[0.0]), rel=1e-6)
    assert norms[1.0] != norms[0.0]


@pytest.mark.parametrize("lr", [0.01, 0.04, 0.1])
def test_a_step_of_path_muon_turns_by_lr(lr):
    """By sqrt(2 / 3) of it: three layers in sequence share the step."""
    model, x, optimizer, z = build(Mlp, PathMuon, lr=lr)
    before = {name: z(name) for name in ("0.weight", "2.weight")}
    step(model, x, optimizer)
    for name, old in before.items():
        cosine = F.cosine_similarity(old.flatten(), z(name).flatten(), 0).item()
        assert math.acos(cosine) == pytest.approx(lr * math.sqrt(2 / 3), rel=0.1), name


def test_rows_that_are_read_apart_turn_apart():
    model, x, optimizer, z = build(Transformer, PathMuon, lr=0.05, growth=0.0)
    name = "layer.self_attn.in_proj_weight"
    before = z(name)
    step(model, x, optimizer)
    for old, new in zip(before.split(8), z(name).split(8), strict=True):
        assert new.norm().item() == pytest.approx(old.norm().item(), rel=1e-6)
        cosine = F.cosine_similarity(old.flatten(), new.flatten(), 0).item()
        assert math.acos(cosine) == pytest.approx(0.05, rel=0.15)


@both
def test_weight_decay_shrinks_the_norms_of_what_turns(make):
    """Decoupled: by a factor of 1 - lr * weight_decay in every step, beside the growth."""
    found = {}
    for decay in (0.0, 0.5):
        model, x, optimizer, z = build(Mlp, make, lr=0.02, weight_decay=decay)
        step(model, x, optimizer)
        found[decay] = {name: z(name) for name, _ in model.named_parameters()}
    for name in ("0.weight", "2.weight", "4.weight"):
        ratio = (found[0.5][name].norm() / found[0.0][name].norm()).item()
        assert ratio == pytest.approx(1 - 0.02 * 0.5, rel=1e-6), name


@both
def test_groups_decay_and_grow_by_their_own_options(make):
    torch.manual_seed(0)
    model = Mlp().double()
    x = torch.randn(16, 12, dtype=torch.float64)
    graph = pathsgd.trace(model, x[:1])
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": [*model[2].parameters(), *model[4].parameters()], "weight_decay": 0.5},
    ]
    optimizer = make(groups, graph=graph, lr=0.02)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, x, optimizer)
    after = list(model.parameters())
    for old, new in zip(before[:2], after[:2], strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=0)
    assert not torch.allclose(before[2], after[2])
    assert after[2].norm() < before[2].norm()
