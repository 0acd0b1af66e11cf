"""Layers in sequence: their number, across all that does not end it, and the part of a step each takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pathsgd import BalancedMuon, trace
from pathsgd.muon import depth as depth_module
from pathsgd.muon.blocks import find_blocks
from pathsgd.muon.depth import find_depths


def find_most(model, x):
    graph = trace(model, x)
    return [max(find_depths(graph, across).values()) for across in ("nothing", "activations", "everything")]


def stack(depth, activation, norm=nn.Identity):
    return nn.Sequential(
        *(layer for _ in range(depth) for layer in (nn.Linear(6, 6), norm(), activation())), nn.Linear(6, 2)
    )


class Residual(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


class WrittenOutNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class WrittenGelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.045 * x**3)))


class WrittenGelu2(nn.Module):
    """With a square, which alone would be one of a norm."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.8 * x * (1 + 0.045 * x**2)))


class GainNorm(nn.Module):
    """A layer norm with a gain that is computed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return F.layer_norm(x, (6,), 1 + self.weight)


class SquaredReLU(nn.Module):
    def forward(self, x):
        return F.relu(x) ** 2


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.value(x)


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Hardswish, WrittenGelu, WrittenGelu2],
)
def test_activations_do_not_end_a_sequence(activation):
    assert find_most(stack(8, activation), torch.randn(1, 6))[1:] == [9, 9]


NORMS = [lambda: nn.LayerNorm(6), lambda: nn.RMSNorm(6), WrittenOutNorm, GainNorm, lambda: nn.LogSoftmax(-1)]


@pytest.mark.parametrize("norm", NORMS)
def test_norms_end_it_but_not_that_of_the_network(norm):
    assert find_most(stack(8, nn.GELU, norm), torch.randn(1, 6)) == [1, 1, 9]


def test_a_norm_after_a_square_does_not_end_that_of_the_network():
    """The square is only used to normalise, and is no path."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(6, 6), SquaredReLU(), nn.LayerNorm(6))]
    assert find_most(nn.Sequential(*layers), torch.randn(1, 6))[2] == 8


def test_batch_norms_do_not():
    model = stack(8, nn.ReLU6, lambda: nn.BatchNorm1d(6))
    assert find_most(model, torch.randn(2, 6)) == [1, 9, 9]


def test_depthwise_convolutions_end_it_but_not_that_of_the_network():
    """With one output for each input, or several."""
    for several in (1, 2):
        layers: list[nn.Module] = []
        for _ in range(6):
            layers += [nn.Conv2d(4, 4 * several, 3, padding=1, groups=4), nn.ReLU6()]
            layers += [nn.Conv2d(4 * several, 4, 1), nn.BatchNorm2d(4), nn.ReLU6()]
        assert find_most(nn.Sequential(*layers), torch.randn(1, 4, 5, 5))[1:] == [2, 12]


def test_what_comes_before_a_depthwise_convolution_counts():
    dense = [layer for _ in range(7) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*dense, nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    assert find_most(model, torch.randn(1, 4, 5, 5)) == [9, 7, 9]


def test_what_is_thrown_away_before_a_depthwise_convolution_does_not():
    class Dead(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(8)))
            self.depthwise, self.head = nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            self.depthwise(self.deep(x))
            return self.head(x)

    assert find_most(Dead(), torch.randn(1, 4, 5, 5))[1] == 1


def test_grouped_convolutions_do_not():
    """Also if each group has one output."""
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.ReLU6())]
    model = nn.Sequential(*layers, nn.Conv2d(4, 2, 3, groups=2))
    assert find_most(model, torch.randn(1, 4, 5, 5))[1:] == [7, 7]


def test_products_of_activations_end_it():
    model = nn.Sequential(*(Gated() for _ in range(4)))
    assert find_most(model, torch.randn(1, 6)) == [1, 1, 4]


def test_a_residual_branch_counts_half():
    blocks = [
        Residual(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)))
        for _ in range(12)
    ]
    model = nn.Sequential(nn.Linear(6, 6), *blocks, nn.LayerNorm(6), nn.Linear(6, 2))
    assert find_most(model, torch.randn(1, 6))[2] == 14


class Conditioned(nn.Module):
    """A condition that is added to every layer, as that on time in a diffusion model."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.shifts = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))

    def forward(self, x, t):
        for layer, shift in zip(self.layers, self.shifts, strict=True):
            x = F.layer_norm(F.silu(layer(x) + shift(t)), (6,))
        return x


class Noisy(nn.Module):
    """Noise is added to every layer."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = F.layer_norm(F.gelu(layer(x) + 0.1 * torch.randn_like(x)), (6,))
        return x


class Parallel(nn.Module):
    """Two branches beside one shortcut, which is a view."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x):
        return x.unsqueeze(1).squeeze(1) + self.first(x) + self.second(x)


def test_only_shortcuts_halve_the_depth_of_a_network():
    x = torch.randn(1, 6)
    assert find_most(Conditioned(12), (x, x))[2] == 12
    assert find_most(Noisy(12), x)[2] == 12
    assert find_most(nn.Sequential(nn.Linear(6, 6), *(Parallel() for _ in range(8))), x)[2] == 5


def test_in_a_network_a_layer_that_is_used_again_and_again_counts_once():
    layers = [nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()]
    assert find_most(nn.Sequential(*layers * 20), torch.randn(1, 6))[2] == 1


def test_layers_in_one_parameter_are_several():
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 6, 6))

        def forward(self, x):
            for weight in self.weight:
                x = F.layer_norm(F.gelu(x @ weight), (6,))
            return x

    assert find_most(Stacked(), torch.randn(1, 6))[2] == 8


def test_networks_side_by_side_have_depths_of_their_own():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep, self.shallow = stack(19, nn.GELU), nn.Linear(6, 2)

        def forward(self, x, y):
            return self.deep(x), self.shallow(y)

    blocks = find_blocks(trace(Towers(), (torch.randn(1, 6), torch.randn(1, 6))))
    assert blocks["shallow.weight"][0].ratio == 1
    assert blocks["deep.0.weight"][0].ratio == pytest.approx(math.sqrt(2 / 20))


@pytest.mark.parametrize(
    ("activation", "norm", "expected"),
    [
        (nn.LeakyReLU, nn.Identity, math.sqrt(2 / 40)),
        (nn.GELU, nn.Identity, math.sqrt(2 / 40)),
        (nn.GELU, lambda: nn.LayerNorm(6), math.sqrt(10 / 40)),
    ],
)
def test_layers_of_a_deep_network_turn_by_less(activation, norm, expected):
    """Measured on one of them, in balanced weights."""
    torch.manual_seed(0)
    model = stack(39, activation, norm).double()
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight)
            nn.init.zeros_(layer.bias)
    x = torch.randn(32, 6, dtype=torch.float64)
    optimizer = BalancedMuon(model, x[:1], lr=0.01)
    before = model[3 * 20].weight.detach().clone()
    model(x).square().sum().backward()
    optimizer.step()
    cosine = F.cosine_similarity(before.flatten(), model[3 * 20].weight.detach().flatten(), dim=0)
    assert math.acos(cosine) == pytest.approx(0.01 * expected, rel=0.2)


class ScaleAndShift(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return self.weight * x + self.bias


@pytest.mark.parametrize("depth", [9, 14])
@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(6), lambda: nn.BatchNorm1d(6), ScaleAndShift])
def test_norms_of_a_deep_network_move_by_less(norm, depth, monkeypatch):
    """Beside steps of the same network with nothing taken off; biases of layers move as they did."""
    ends = []
    for shallow in (depth_module.SHALLOW_NETWORK, math.inf):
        monkeypatch.setattr(depth_module, "SHALLOW_NETWORK", shallow)
        torch.manual_seed(0)
        model = stack(depth, nn.GELU, norm).double()
        x = torch.randn(32, 6, dtype=torch.float64)
        optimizer = BalancedMuon(model, x[:2], lr=0.01)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(x).square().sum().backward()
        optimizer.step()
        ends.append({name: p.detach() - start[name] for name, p in model.named_parameters()})
    expected = min(1.0, math.sqrt(10 / (depth + 1)))
    for name in ("1.weight", "1.bias", f"{3 * depth - 2}.weight"):
        torch.testing.assert_close(ends[0][name], expected * ends[1][name])
    torch.testing.assert_close(ends[0][f"{3 * depth}.bias"], ends[1][f"{3 * depth}.bias"])
