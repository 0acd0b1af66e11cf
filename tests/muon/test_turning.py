"""A step turns matrices and kernels: their norm is what it was, times a growth."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import BalancedMuon
from pathsgd.muon.blocks import find_blocks
from support.networks import Transformer, Vgg


class Mlp(nn.Sequential):
    example = (16, 12)

    def __init__(self):
        super().__init__(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 8))


def build(network, **options):
    """(model, batch, optimizer)."""
    torch.manual_seed(0)
    model = network().double().eval()  # running statistics stay
    x = torch.randn(network.example, dtype=torch.float64)
    return model, x, BalancedMuon(model, x[:1], **{"weight_decay": 0.0, **options})


def step(model, x, optimizer):
    """The weights before the step and after it, by name."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    y = model(x).flatten(1)
    F.cross_entropy(y, torch.arange(len(y)) % y.shape[1]).backward()
    optimizer.step()
    return before, {name: p.detach() for name, p in model.named_parameters()}


def turning(optimizer):
    """(name, block) of the blocks that turn."""
    blocks = find_blocks(optimizer.graph)
    return [(name, block) for name, parts in blocks.items() for block in parts if block.turns]


def angle(before, after):
    return math.acos(F.cosine_similarity(before.flatten(), after.flatten(), 0).item())


@pytest.mark.parametrize("network", [Mlp, Vgg, Transformer])
def test_without_growth_norms_are_kept(network):
    model, x, optimizer = build(network, growth=0.0)
    blocks = turning(optimizer)
    assert len(blocks) >= 3
    before, after = step(model, x, optimizer)
    for name, block in blocks:
        old, new = block.of(before[name]), block.of(after[name])
        assert new.norm().item() == pytest.approx(old.norm().item(), rel=1e-6), name
        assert not torch.allclose(new, old, rtol=1e-3), name


def test_growth_is_what_the_radial_gradient_asks_for():
    """In the first step the logarithms of the norms of a region move by lr * growth together."""
    model, x, optimizer = build(Mlp, lr=0.03, growth=1.0)
    names = [name for name, _ in turning(optimizer)]
    before, after = step(model, x, optimizer)
    for name in names:
        along = (model.get_parameter(name).grad * before[name]).sum().item()
        expected = math.exp(-math.copysign(0.03 / len(names), along))
        assert (after[name].norm() / before[name].norm()).item() == pytest.approx(expected, rel=1e-6), name


def test_growth_is_measured_in_units_of_lr():
    norms = {}
    for growth in (0.0, 1.0, 4.0):
        norms[growth] = step(*build(Mlp, lr=0.01, growth=growth))[1]["2.weight"].norm().log().item()
    assert norms[4.0] - norms[0.0] == pytest.approx(4 * (norms[1.0] - norms[0.0]), rel=1e-6)
    assert norms[1.0] != norms[0.0]


def test_what_has_no_scale_does_not_grow(monkeypatch):
    """Before a batch norm <G, W> is rounding, which must not become a step."""

    def change():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8, eps=1e-300), nn.ReLU(), nn.Linear(8, 3)
        ).double()
        x, before = torch.randn(32, 5, dtype=torch.float64), model[0].weight.norm().item()
        optimizer = BalancedMuon(model, x[:1], weight_decay=0.0)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.arange(32) % 3).backward()
            optimizer.step()
        return abs(model[0].weight.norm().item() / before - 1)

    assert change() < 1e-3
    monkeypatch.setattr("pathsgd.muon.balanced_muon.NOISE", 0.0)
    assert change() > 1e-2


@pytest.mark.parametrize("lr", [0.01, 0.04, 0.1])
def test_the_first_step_turns_by_lr(lr):
    before, after = step(*build(Mlp, lr=lr))
    for name in ("0.weight", "2.weight"):
        assert angle(before[name], after[name]) == pytest.approx(lr, rel=0.1), name


def test_matrices_go_farther_in_directions_of_adam():
    """In the first step these are signs, of root mean square 1."""
    before, after = step(*build(Mlp, lr=0.02))
    assert math.tan(angle(before["4.weight"], after["4.weight"])) == pytest.approx(2.5 * 0.02, rel=0.05)
    moved = (after["4.bias"] - before["4.bias"]).abs()
    rms = before["4.weight"].square().mean().sqrt()
    torch.testing.assert_close(moved, (0.02 * rms).expand(8), rtol=1e-6, atol=0)


def test_later_steps_turn_by_less():
    """By the third root of the number of steps."""
    model, _, optimizer = build(Mlp, lr=0.02, momentum=0.0)
    weight, angles = model[2].weight, []
    for _ in range(31):
        before = weight.detach().clone()
        optimizer.zero_grad()
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        angles.append(angle(before, weight.detach()))
    for k in (10, 30):
        assert angles[k] == pytest.approx(0.02 * (1 + k / 10) ** (-1 / 3), rel=0.1)


def test_momentum_reaches_back_a_tenth_of_the_steps():
    """Gradients of one direction: the buffer is the sum of what is left of them, as written out."""
    model, _, optimizer = build(Mlp, lr=0.0, momentum=0.9)
    weight, expected = model[2].weight, 0.0
    for k in range(120):
        optimizer.zero_grad()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        expected = min(0.9, 1 - 1 / (2 + k / 10)) * expected + 1
    buffer = optimizer.state[weight]["momentum_buffer"]
    torch.testing.assert_close(buffer, torch.full_like(buffer, expected))
    assert 8 < expected < 10


def test_rows_that_are_read_apart_turn_apart():
    before, after = (
        weights["layer.self_attn.in_proj_weight"].split(8)
        for weights in step(*build(Transformer, lr=0.05, growth=0.0))
    )
    for old, new in zip(before, after, strict=True):
        assert new.norm().item() == pytest.approx(old.norm().item(), rel=1e-6)
        assert angle(old, new) == pytest.approx(0.05, rel=0.15)


def test_weight_decay_shrinks_the_norms_of_what_turns():
    """Decoupled, beside the growth and shared like it: all norms of a region by exp(-lr * weight_decay)."""
    plain, decayed = (step(*build(Mlp, lr=0.02, weight_decay=decay))[1] for decay in (0.0, 0.5))
    for name in ("0.weight", "2.weight", "4.weight"):
        ratio = (decayed[name].norm() / plain[name].norm()).item()
        assert ratio == pytest.approx(math.exp(-0.02 * 0.5 / 3), rel=1e-6), name


def test_later_steps_grow_by_less():
    """As the number of steps; and so do they decay."""
    model, x, optimizer = build(Mlp, lr=0.02, growth=0.0, weight_decay=0.5)
    for k in range(31):
        before, after = step(model, x, optimizer)
        if k in (0, 10, 30):
            decay = math.log(before["2.weight"].norm() / after["2.weight"].norm())
            assert decay == pytest.approx(0.02 / (1 + k / 10) * 0.5 / 3, rel=1e-6)


def test_groups_decay_and_grow_by_their_own_options():
    torch.manual_seed(0)
    model = Mlp().double()
    x = torch.randn(16, 12, dtype=torch.float64)
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": [*model[2].parameters(), *model[4].parameters()], "weight_decay": 0.5, "growth": 0.0},
    ]
    before, after = step(model, x, BalancedMuon(groups, graph=pathsgd.trace(model, x[:1]), lr=0.02))
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(after[name], before[name], rtol=1e-12, atol=0)
    for name in ("2.weight", "4.weight"):
        ratio = (after[name].norm() / before[name].norm()).item()
        assert ratio == pytest.approx(math.exp(-0.02 * 0.5 / 3), rel=1e-6), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth": -1.0}, "Invalid growth value: -1.0"),
        ({"lr": -1.0}, "Invalid learning rate value: -1.0"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ({"momentum": float("nan")}, "Invalid momentum value: nan"),
        ({"betas": (0.9, 1.0)}, "Invalid betas"),
    ],
)
def test_options_out_of_their_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BalancedMuon(Mlp(), **options)
