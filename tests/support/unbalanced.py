"""A small network that is not balanced, and short trainings of it by BalancedMuon."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import BalancedMuon

TARGETS = torch.arange(24) % 4


class Lazy(nn.Module):
    """Its inputs are not known before it sees a batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(12, 10), nn.Linear(10, 4)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(),
            nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4),
        )  # fmt: skip


@functools.cache
def traced():
    """Tracing takes longer than most of these tests."""
    with torch.random.fork_rng(devices=[]):
        return pathsgd.trace(Plain())


def make(model, **options):
    """An optimizer of a model that was built here."""
    return BalancedMuon(model, traced(), **options)


def build(dtype=torch.float64, seed=0):
    """(model, a batch): not balanced."""
    torch.manual_seed(seed)
    model = Plain().to(dtype)
    pathsgd.unbalance(model, traced(), powers_of_two=True)
    return model, torch.randn(24, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def train(model, optimizers, x, steps=1):
    """The loss before each step."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    losses = []
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), TARGETS)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(model, others):
    """Whether weights are these, to the bit."""
    others = list(others.parameters()) if isinstance(others, nn.Module) else others
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), others, strict=True))


def same_state(state, other):
    tensors = [[x for kept in s["state"].values() for x in kept.values()] for s in (state, other)]
    return state["param_groups"] == other["param_groups"] and all(map(torch.equal, *tensors))


def distance(y, other):
    return ((y - other).norm() / other.norm()).item()
