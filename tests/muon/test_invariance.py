"""A network and its rescaled copy train alike: after ``balance`` in any optimizer, in BalancedMuon at any time."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import BalancedMuon
from pathsgd.geometry.rescale import apply_factors
from pathsgd.graph.unit_classes import FIXED, unit_classes_of
from pathsgd.muon import balanced_muon, upkeep
from support import cases, networks

# Starts that have no minimum of their own, or that are far from any


class Biased(nn.Sequential):
    """A convolution's bias before batch norm: its gradient is zero, but for rounding."""

    example = (8, 2, 6, 6)

    def __init__(self):
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip


class LowRank(nn.Module):
    """LoRA: a product B A is added to a matrix, and B starts at zero. Nothing ties the rows of A down."""

    example = (4, 6)

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(4, 8, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.head(F.relu(self.base(x) + self.b(self.a(x))))


class ZeroHead(nn.Sequential):
    """A last layer of zeros: no unit is on a walk to an output."""

    example = (4, 6)

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 4, bias=False))
        nn.init.zeros_(self[4].weight)


class ZeroGain(nn.Module):
    """A residual branch that starts at zero by its gain."""

    example = (4, 6)

    def __init__(self):
        super().__init__()
        self.stem, self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 8), nn.Linear(8, 5)
        self.gain, self.head = nn.Parameter(torch.zeros(5)), nn.Linear(5, 3)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(x + self.gain * self.down(F.relu(self.up(F.relu(x))))))


class DeadChain(nn.Sequential):
    """Units of two layers that nothing leads into, and that lead into each other and the next layer."""

    example = (4, 6)

    def __init__(self):
        super().__init__(
            nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False), nn.ReLU(),
            nn.Linear(6, 4, bias=False),
        )  # fmt: skip
        with torch.no_grad():
            self[0].weight[:2] = 0
            self[2].weight[:2, 2:] = 0


class Deep(nn.Sequential):
    example = (4, 3)

    def __init__(self):
        layers = [(nn.Linear(3, 3), nn.LeakyReLU(0.5)) for _ in range(299)]
        super().__init__(*(module for layer in layers for module in layer), nn.Linear(3, 2))
        for module in list(self)[::2]:
            nn.init.orthogonal_(module.weight, 1.2)


class Squares(nn.Module):
    """Six squared ReLUs: a factor of the first enters the last by its 64th power."""

    example = (4, 6)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x)).square()
        return self.head(x)


class Explosive(nn.Module):
    """A recurrence of gain 100."""

    example = (4, 3, 3)

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(4, 2)
        self.rnn.weight_hh_l0.data = 100 * torch.eye(4)
        self.head.weight.data /= 1e4

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class TiedLayers(nn.Module):
    """One matrix in two layers, and units around them that are still free."""

    example = (4, 6)

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.wide, self.narrow, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = F.relu(self.shared(F.relu(self.shared(x))))
        return self.head(F.relu(self.narrow(F.relu(self.wide(F.relu(self.last(x)))))))


class TiedTable(nn.Module):
    """The table of tokens is the last layer, too."""

    example = (4, 5)

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(7, 6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 7, bias=False)
        self.last.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        return self.last(x + self.down(F.relu(self.up(self.norm(x)))))[:, -1]


STARTS = [
    Biased, LowRank, ZeroHead, ZeroGain, DeadChain, Squares, Explosive, TiedLayers, TiedTable,
]  # fmt: skip
EVERY = [*cases.RESCALABLE, *networks.NETWORKS, *STARTS]
by_name = {"ids": lambda network: network.__module__.rpartition(".")[2] + "-" + network.__name__}


@functools.cache
def traced(network):
    if network in cases.CASES:
        return cases.traced(network)
    model, x = build(network)
    return pathsgd.trace(model, x[:1])


def build(network, dtype=torch.float64):
    """(model, a batch), the same every time."""
    if network in cases.CASES:
        model = cases.build(network)
        x = model.example(4)
    elif network in networks.NETWORKS:
        model, x = networks.build(network)
    else:
        torch.manual_seed(3)
        model, x = network().double(), torch.randn(network.example, dtype=torch.float64)
        if network is TiedTable:
            x = torch.arange(20).reshape(4, 5) % 7
    x = torch.arange(x.numel()).reshape(x.shape) % 3 if network is cases.Embedded else x
    return model.to(dtype).train(network is Biased), x if x.dtype == torch.int64 else x.to(dtype)


# Rescalings


def draw(kind, count):
    """The factors of all units."""
    generator = torch.Generator().manual_seed(1)
    if kind == "one unit":
        factors = torch.ones(count, dtype=torch.float64)
        factors[1 + int(torch.randint(count - 1, (), generator=generator))] = 1e-12
        return factors
    drawn = 10 * torch.randn(count, generator=generator, dtype=torch.float64)
    drawn = drawn.clamp(-30, 30)
    return torch.exp2(drawn.round() if kind == "powers of two" else drawn)


KINDS = ["log-normal", "powers of two", "one unit"]


def rescale(model, graph, kind):
    units = unit_classes_of(graph)
    apply_factors(graph.tensors(model), units, draw(kind, units.count))


def rescaled(model, graph, kind):
    copied = copy.deepcopy(model)
    rescale(copied, graph, kind)
    return copied


# Training


def outputs(model, x):
    found = model(x)
    return torch.cat([y.reshape(len(y), -1) for y in (found if isinstance(found, tuple) else (found,))], 1)


def train(model, optimizers, x, steps=5, before_step=()):
    """Outputs after training; ``before_step`` maps steps to what is called before them."""
    for step in range(steps):
        dict(before_step).get(step, lambda: None)()
        for optimizer in optimizers:
            optimizer.zero_grad()
        y = outputs(model, x)
        F.cross_entropy(y, torch.arange(len(y)) % y.shape[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
    return outputs(model, x).detach()


def make_muon(model, graph):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    made = [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
    return [*made, torch.optim.SGD(others, lr=1e-2)] if others else made


OPTIMIZERS = {
    "AdamW": lambda m, g: [torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1)],
    "SGD": lambda m, g: [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9)],
    "Muon": make_muon,
    "BalancedMuon": lambda m, g: [BalancedMuon(m, g)],
}


def start(network, name, kind=None, dtype=torch.float64, balance=True):
    """(model, optimizers, batch) of a copy rescaled in this way, or of the original."""
    graph = traced(network)
    model, x = build(network, dtype)
    if kind is not None:
        rescale(model, graph, kind)
    if balance and name != "BalancedMuon":
        pathsgd.balance(model, graph)
    return model, OPTIMIZERS[name](model, graph), x


@functools.cache
def original(network, name):
    """(outputs before, outputs after, weights after) of the original."""
    before = outputs(*build(network)[::1]).detach()
    model, optimizers, x = start(network, name)
    return before, train(model, optimizers, x), [p.detach() for p in model.parameters()]


def differences(network, name, kind, **options):
    """Of a copy: of its outputs, relative to how far training moved them, and the largest of its weights,
    relative to the parameter's norm."""
    before, after, weights = original(network, name)
    model, optimizers, x = start(network, name, kind, **options)
    found = train(model, optimizers, x)
    movement = (after - before).norm()
    assert movement > 1e-6 * before.norm()
    of_weights = [
        ((p - w).norm() / w.norm()).item()
        for p, w in zip(model.parameters(), weights, strict=True)
        if w.norm() > 0
    ]
    return ((found - after).norm() / movement).item(), max(of_weights)


if __name__ == "__main__":
    import sys, time, warnings

    torch.set_num_threads(1)
    total = time.time()
    for network in EVERY + ([Deep] if len(sys.argv) > 1 else []):
        for name in OPTIMIZERS:
            row = []
            t0 = time.time()
            for kind in KINDS:
                try:
                    row.append("%.0e %.0e" % differences(network, name, kind))
                except Exception as e:
                    row.append(f"{type(e).__name__}: {str(e)[:150]}")
            print(f"{network.__name__:14} {name:13} {time.time() - t0:.1f}s", " | ".join(row), flush=True)
    print(time.time() - total)
