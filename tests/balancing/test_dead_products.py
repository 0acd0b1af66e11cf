"""balance where weights of zero leave a factor of a product, or a unit behind it, without a minimum."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from pathsgd import BalancedMuon
from support.starts import KINDS, are_equal, balanced, computes_the_same, largest_difference, rescaled


class GatedSkip(nn.Module):
    """What follows from two factors is joined to a unit of a layer beside them."""

    def __init__(self, width):
        super().__init__()
        self.up, self.gate, self.skip, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        return self.out(self.up(x) * self.gate(x).relu() + self.skip(x))


def test_a_unit_that_was_pruned_stays_finite():
    model, x = GatedSkip(2).double(), torch.randn(3, 2, dtype=torch.float64)
    with torch.no_grad():
        model.skip.weight[0] = model.gate.weight[1] = 0
        model.out.weight[:, 1] = 0
    assert computes_the_same(model, balanced(model, x), x)
    BalancedMuon(model, x)
    assert all(p.isfinite().all() for p in model.parameters())
    assert pathsgd.inspect(model, x).ratio == pytest.approx(1)


@pytest.mark.parametrize("seed", range(12))
def test_gates_that_are_dead(seed):
    torch.manual_seed(seed)
    model, x = GatedSkip(16).double(), torch.randn(5, 16, dtype=torch.float64)
    with torch.no_grad():
        model.gate.weight[torch.rand(16) < 0.3] = 0
        if seed % 2:
            model.out.weight[:, torch.rand(16) < 0.3] = 0
    graph = pathsgd.trace(model, x)
    result = balanced(model, graph)
    assert computes_the_same(model, result, x)
    assert are_equal(result, balanced(copy.deepcopy(result), graph))
    for kind in KINDS[:2]:
        other = balanced(rescaled(model, graph, kind), graph)
        assert largest_difference(result, other) <= (0 if kind == "powers of two" else 1e-11)
