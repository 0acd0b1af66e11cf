"""Layers that start at zero train: a last layer, residual branches, an adapter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pathsgd import BalancedMuon

STEPS = 100
CLASSES = 10


def batches(seed, steps, size=128):
    """Fresh examples in every step, of classes that a random network draws: the least loss is not 0."""
    teacher = torch.Generator().manual_seed(0)
    first = torch.randn(64, 24, generator=teacher) / 8
    second = 0.8 * torch.randn(24, CLASSES, generator=teacher)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(size, 64, generator=generator)
        y = torch.multinomial((F.relu(x @ first) @ second).softmax(1), 1, generator=generator)
        yield x, y[:, 0]


class ZeroHead(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        nn.init.zeros_(self[4].weight), nn.init.zeros_(self[4].bias)


class ZeroBranches(nn.Module):
    """Residual blocks of convolutions, the last one of each zero."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Linear(128, CLASSES)
        self.first = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.last = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        for conv in self.last:
            nn.init.zeros_(conv.weight), nn.init.zeros_(conv.bias)

    def forward(self, x):
        x = self.stem(x.view(-1, 1, 8, 8))
        for first, last in zip(self.first, self.last, strict=True):
            x = x + last(F.relu(first(F.relu(x))))
        return self.head(F.relu(x).flatten(1))


class Adapted(nn.Module):
    """A frozen layer and what is learned beside it: x W^T + x A^T B^T, with B = 0."""

    def __init__(self, into, out, rank=8):
        super().__init__()
        self.base = nn.Linear(into, out).requires_grad_(False)
        self.a, self.b = nn.Linear(into, rank, bias=False), nn.Linear(rank, out, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Lora(nn.Sequential):
    def __init__(self):
        super().__init__(Adapted(64, 64), nn.ReLU(), Adapted(64, 64), nn.ReLU(), Adapted(64, CLASSES))


# The least loss of torch.optim.AdamW after the same steps at 1e-3, 3e-3, 1e-2, 3e-2 and 1e-1.
ADAMW = {ZeroHead: 1.373, ZeroBranches: 1.452, Lora: 1.446}


def train(model, optimizer, steps=STEPS):
    """The loss on examples that were not seen, after training at a constant rate."""
    for x, y in batches(1, steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    ((x, y),) = batches(2, 1, size=4000)
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


@pytest.mark.parametrize("network", [ZeroHead, ZeroBranches, Lora])
def test_zeros_train(network):
    torch.manual_seed(0)
    model = network()
    start = copy.deepcopy(model)
    loss = train(model, BalancedMuon(model, torch.zeros(1, 64)))
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all()
        assert p.requires_grad != torch.equal(p, start.get_parameter(name)), name
    assert loss <= 1.1 * ADAMW[network]


def test_zero_branches_grow():
    """This task can do without the branches, so the test above does not see them."""
    torch.manual_seed(0)
    model = ZeroBranches()
    train(model, BalancedMuon(model, torch.zeros(1, 64)), steps=50)
    for first, last in zip(model.first, model.last, strict=True):
        assert last.weight.norm() >= 0.1 * first.weight.norm()


def test_a_network_of_zeros_moves_what_has_a_gradient():
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    ((x, _),) = batches(1, 1)
    y = torch.zeros(len(x), dtype=torch.int64)
    optimizer = BalancedMuon(model, x)
    before = F.cross_entropy(model(x), y)
    before.backward()
    optimizer.step()
    assert F.cross_entropy(model(x), y) < before
    assert not any(p.any() for p in (model[0].weight, model[0].bias, model[2].weight))
