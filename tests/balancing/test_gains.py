"""balance leaves the mean gain of a norm at 1, as it is initialised."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from support.starts import KINDS, are_equal, balanced, computes_the_same, largest_difference, rescaled


class Normed(nn.Module):
    """A position added behind a norm, gains without their 1, queries and keys with gains; the first and the
    last gain of the second norm are zero, and only the first of these has a bias."""

    example = (2, 4, 6)

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.LayerNorm(6) for _ in range(3))
        self.queries, self.keys = nn.RMSNorm(6), nn.RMSNorm(6)
        self.position = nn.Parameter(0.02 * torch.randn(4, 6))
        self.shifted = nn.Parameter(torch.zeros(6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(7))
        with torch.no_grad():
            self.second.weight[0] = self.second.weight[-1] = 0
            self.second.bias[0] = 0.25

    def forward(self, x):
        a, b, c, d, e, f, g = self.layers
        x = x + a(self.first(x) + self.position) + b(F.relu(self.second(x)))
        x = x + d(F.relu(c(F.normalize(x, dim=-1) * (1 + self.shifted))))
        x = x + F.softmax(self.queries(e(x)) @ self.keys(f(x)).mT, -1) @ x
        return g(self.third(x))


@pytest.fixture(scope="module")
def normed():
    torch.manual_seed(0)
    model, x = Normed().double(), torch.randn(Normed.example, dtype=torch.float64)
    return model, x, pathsgd.trace(model, x)


def test_mean_gains_are_1(normed):
    model, x, graph = normed
    result = balanced(model, graph)
    means = result.first.weight.mean(), 1 + result.shifted.mean(), result.third.weight.mean()
    torch.testing.assert_close(torch.stack(means), torch.ones(3).double(), rtol=1e-13, atol=0)
    live = torch.cat([result.second.bias[:1], result.second.weight[1:5]])  # not the last: it is dead
    torch.testing.assert_close(live.mean().item(), 1.0, rtol=1e-13, atol=0)
    for name in ("queries", "keys"):  # against each other
        assert torch.equal(result.get_submodule(name).weight, torch.ones(6).double()), name
    assert computes_the_same(model, result, x)


@pytest.mark.parametrize("kind", KINDS)
def test_rescaled_copies_become_one(normed, kind):
    model, _, graph = normed
    result, other = balanced(model, graph), balanced(rescaled(model, graph, kind), graph)
    assert largest_difference(result, other) <= (0 if kind == "powers of two" else 1e-11)
    assert are_equal(result, balanced(result, graph))


def test_by_hand():
    """Between units of one norm gains are those of least mu: each like the root of what is behind it."""
    model = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)).double()
    expected = model[1].weight.detach().norm(dim=0).sqrt()
    pathsgd.balance(model, torch.zeros(2, 5, dtype=torch.float64))
    torch.testing.assert_close(model[0].weight.detach(), expected / expected.mean(), rtol=1e-12, atol=0)


def test_norms_with_units_in_common_are_one():
    """As in a residual stream behind batch norms: gains of 1 stay, and those three times as large do not."""

    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
            self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            x = self.first(x)
            return self.last(F.relu(x + self.second(self.inner(F.relu(x)))))

    model = Stream().double()
    nn.init.ones_(model.inner.weight)
    nn.init.ones_(model.last.weight)
    x = torch.randn(6, 4, dtype=torch.float64)
    graph = pathsgd.trace(model, x)
    for factor in (1.0, 3.0):
        pathsgd.rescale(model, graph, {"first": factor})
        pathsgd.balance(model, graph)
        for gain in (model.first.weight, model.second.weight):
            torch.testing.assert_close(gain.detach(), torch.ones(4).double(), rtol=1e-12, atol=0)


def test_biases_and_bounds_are_no_gains():
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)).double()
    nn.init.constant_(model[0].bias, 5.0)
    pathsgd.balance(model, torch.zeros(2, 6, dtype=torch.float64))
    assert model[0].weight.mean().item() == pytest.approx(1, rel=1e-12)
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU6(), nn.Conv2d(6, 4, 3)).eval()
    pathsgd.replace_relu6(model, x)
    pathsgd.balance(model, x)
    assert model[1].weight.mean().item() == pytest.approx(1, rel=1e-6)


def test_slopes_of_their_own_do_not_keep_units_from_being_normed():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.PReLU(6), nn.Conv2d(6, 4, 3)).eval()
    pathsgd.balance(model, torch.randn(2, 3, 7, 7))
    assert model[1].weight.mean().item() == pytest.approx(1, rel=1e-6)


def test_norms_of_which_parts_cannot_be_rescaled_are_apart():
    """Half of each goes through a GELU, whose units are fixed: the norms have no other unit in common."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(6), nn.LayerNorm(6)
            self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            a, b = self.first(x).chunk(2, -1)
            a, b = self.second(self.inner(torch.cat([F.relu(a), F.gelu(b)], -1))).chunk(2, -1)
            return self.last(torch.cat([F.relu(a), F.gelu(b)], -1))

    model = Half().double()
    model.last.weight.data *= 100
    pathsgd.balance(model, torch.randn(3, 6, dtype=torch.float64))
    for norm in (model.first, model.second):
        assert norm.weight[:3].mean().item() == pytest.approx(1, rel=1e-12)
