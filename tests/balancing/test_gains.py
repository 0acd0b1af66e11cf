"""balance brings the gains of norms to what they are initialised as."""

from __future__ import annotations

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


def test_gains_of_norms_become_what_they_are_initialised_as():
    torch.manual_seed(0)
    model = Normed().double()
    x = torch.randn(Normed.example, dtype=torch.float64)
    graph = pathsgd.trace(model, x)
    result = balanced(model, graph)
    for name, value in result.named_parameters():
        before, is_gain = model.get_parameter(name), value.dim() < 2 and "layers" not in name
        if name == "second.bias":
            assert value.tolist() == [1.0, 0, 0, 0, 0, 0]
        elif is_gain:
            assert torch.equal(value, before), name
    for name in ("0.weight", "1.bias", "5.weight"):
        assert torch.equal(result.layers.get_parameter(name), model.layers.get_parameter(name)), name
    assert computes_the_same(model, result, x)
    for kind in KINDS:
        copied = rescaled(model, graph, kind)
        assert largest_difference(result, balanced(copied, graph)) <= 1e-11
        assert kind != "powers of two" or are_equal(result, balanced(copied, graph))
