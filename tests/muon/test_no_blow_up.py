"""Default steps from bad starts: units that hardly any path uses, depth, small path norms."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import BalancedMuon
from pathsgd.muon.balanced_muon import FARTHER


def data(classes=4, inputs=16, count=64):
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, inputs, generator=generator)
    y = torch.arange(count) % classes
    return centres[y] + 0.5 * torch.randn(count, inputs, generator=generator), y


def train(model, optimizer, x, y, steps):
    """The loss before every step and after the last."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return [*losses, F.cross_entropy(model(x), y).item()]


@pytest.mark.parametrize("size", [1e-6, 1e-12, 1e-25])
@pytest.mark.parametrize("layer", [2, 4])
def test_a_unit_with_small_outgoing_weights(size, layer):
    x, y = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        model[layer].weight[:, 3] *= size
    losses = train(model, BalancedMuon(model, x[:1]), x, y, 5)
    assert losses[-1] < losses[0]
    assert max(losses) <= losses[0]


@pytest.mark.parametrize("size", [1e-6, 1e-12, 1e-25])
def test_a_channel_with_small_outgoing_weights(size):
    x, y = data()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip
    with torch.no_grad():
        model[3].weight[:, 3] *= size
    losses = train(model, BalancedMuon(model, x[:1]), x, y, 5)
    assert losses[-1] < losses[0]
    assert max(losses) <= losses[0]


def deep(depth, width=8):
    """torch's default initialisation: the path norm falls by a third with every layer."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, width), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


@functools.cache
def traced(depth):
    return pathsgd.trace(deep(depth), data()[0][:1])


@pytest.mark.parametrize(("depth", "steps"), [(60, 10), (150, 1)])
def test_depth(depth, steps):
    """A step moves a matrix by about lr of its norm, the last one farther, and a bias by no more than its
    layer's weights."""
    x, y = data()
    model = deep(depth)
    optimizer = BalancedMuon(model, traced(depth))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lr = optimizer.param_groups[0]["lr"]
    losses = train(model, optimizer, x, y, 1)
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - before[name]).square().mean().sqrt().item()
        size = before[name.replace("bias", "weight")].square().mean().sqrt().item()
        assert torch.isfinite(parameter).all(), name
        most = FARTHER if parameter is model[-1].weight else 1
        assert moved <= (4 * lr if name.endswith("bias") else 1.5 * lr * most) * size, name
    losses = [losses[0], *train(model, optimizer, x, y, steps - 1)]
    assert max(losses) <= 1.1 * losses[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_eight_convolutions_with_batch_norm():
    x, y = data(inputs=64)
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (1, 8, 8))]
    for into in (1, *[8] * 7):
        layers += [nn.Conv2d(into, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    losses = train(model, BalancedMuon(model, x[:1]), x, y, 10)
    assert max(losses) <= 1.1 * losses[0]
    assert losses[-1] < losses[0]
