"""Quantisation: what equalised channels keep of a network whose weights are rounded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from benchmarks.league.deep_networks import Residual, conv, head
from benchmarks.uses.networks import fold
from benchmarks.uses.quantisation import WAYS, round_activations, round_weights


@pytest.fixture(scope="module")
def start():
    """A network with depthwise layers and ReLU6, the same folded, and a copy of that, rescaled by powers of
    two; an input."""
    torch.manual_seed(0)
    wide, narrow = conv(8, 8, 3, nn.ReLU6, groups=8), conv(8, 8, 1, None)
    model = nn.Sequential(*conv(3, 8, 3, nn.ReLU6), Residual(*wide, *narrow), *head(8)).eval()
    x = torch.randn(4, 3, 8, 8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 1, 4)
            nn.init.uniform_(module.running_var, 0.1, 1)
    folded = fold(model)
    pathsgd.replace_relu6(folded, x)
    unbalanced = copy.deepcopy(folded)
    pathsgd.unbalance(unbalanced, x, powers_of_two=True, generator=torch.Generator().manual_seed(0))
    return model, folded, unbalanced, x


def error(model, rounded, x):
    expected = model(x)
    return float((rounded(x) - expected).norm() / expected.norm())


@torch.no_grad()
def test_balanced_copies_are_rounded_alike(start):
    _, folded, unbalanced, x = start
    plain = [error(folded, round_weights(model, 8, False), x) for model in (folded, unbalanced)]
    assert plain[1] > 5 * plain[0]
    outputs = [
        round_weights(WAYS["balance, p = q = 2"](model, x), 8, False)(x) for model in (folded, unbalanced)
    ]
    assert torch.equal(*outputs)


@torch.no_grad()
def test_relu6_is_kept(start):
    model, _, _, x = start
    for way in ("as trained", "balance, p = q = 2", "balance, p = q = 8"):
        assert error(model, WAYS[way](model, x), x) < 1e-5


@torch.no_grad()
def test_levels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 40))
    for bits in (4, 8):
        whole = round_weights(model, bits, by_channel=False)[0].weight
        assert whole.unique().numel() <= 2**bits - 1
        assert float((whole - model[0].weight).abs().max()) <= float(model[0].weight.abs().max()) / (
            2**bits - 2
        )
        rows = round_weights(model, bits, by_channel=True)[0].weight
        assert all(row.unique().numel() <= 2**bits - 1 for row in rows)
        assert torch.equal(rows.abs().amax(1), model[0].weight.abs().amax(1))


@torch.no_grad()
def test_activations_are_rounded_in_their_range():
    model, x = nn.Sequential(nn.Identity(), nn.Linear(300, 300)), torch.linspace(-1, 3, 300)[None]
    nn.init.eye_(model[1].weight)
    model[1].bias.zero_()
    rounded = round_activations(model, x)(x)
    assert rounded.unique().numel() == 256
    assert float((rounded - x).abs().max()) <= 2 / 255 + 1e-6
