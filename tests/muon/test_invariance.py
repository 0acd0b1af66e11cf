"""A network and its rescaled copy train alike: in any optimizer after ``balance``, in BalancedMuon always."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd import BalancedMuon
from pathsgd.balance.rescale import apply_factors
from pathsgd.graph.unit_classes import unit_classes_of
from pathsgd.muon import balanced_muon, round, upkeep
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
        layers = [(nn.Linear(3, 3, bias=False), nn.LeakyReLU(0.5)) for _ in range(299)]
        super().__init__(*(module for layer in layers for module in layer), nn.Linear(3, 2))
        for module in list(self)[:-1:2]:
            nn.init.orthogonal_(module.weight, 1.3)


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


def train(model, optimizers, x, steps=5, before_step=None):
    """Outputs after training; ``before_step`` has what is called before some of the steps."""
    for step in range(steps):
        if step in (before_step or ()):
            before_step[step]()
        for optimizer in optimizers:
            optimizer.zero_grad()
        y = outputs(model, x)
        targets = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()
        (y - targets).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return outputs(model, x).detach()


def make_muon(model, graph, **options):
    """For matrices; for the rest SGD."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    made = [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
    return [*made, torch.optim.SGD(others, lr=1e-3)] if others else made


OPTIMIZERS = {
    "AdamW": lambda m, g: [torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1)],
    "SGD": lambda m, g: [torch.optim.SGD(m.parameters(), lr=1e-4, momentum=0.9)],
    "Muon": make_muon,
    "BalancedMuon": lambda m, g, **options: [BalancedMuon(m, g, **options)],
}


def start(network, name, kind=None, dtype=torch.float64, **options):
    """(model, optimizers, a batch) of a copy rescaled in this way, or of the original."""
    graph = traced(network)
    model, x = build(network, dtype)
    if kind is not None:
        rescale(model, graph, kind)
    if name != "BalancedMuon":
        pathsgd.balance(model, graph)
    return model, OPTIMIZERS[name](model, graph, **options), x


def difference(network, name, *kinds, steps=5, rescaled_at=(), rescaled_first=True, **options):
    """Between the original and copies that are rescaled, before training and before some of the steps: the
    largest of those of outputs, relative to how far training moved them, and of weights, relative to the norm
    of their parameter."""
    model, optimizers, x = start(network, name, **options)
    before = outputs(model, x).detach()
    after = train(model, optimizers, x, steps)
    movement = (after - before).norm()
    assert movement > 1e-4 * before.norm()
    largest = torch.zeros((), dtype=after.dtype)
    for kind in kinds:
        other, optimizers, x = start(network, name, kind if rescaled_first else None, **options)
        again = {step: functools.partial(rescale, other, traced(network), kind) for step in rescaled_at}
        found = train(other, optimizers, x, steps, again)
        largest = torch.maximum(largest, (found - after).norm() / movement)
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            largest = torch.maximum(largest, (p - q).norm() / q.norm().clamp(min=1e-30))
    return largest.item()


def bound(network):
    """Gradients of biases that are zero but for rounding are normalised to steps: before a batch norm, of
    keys."""
    return 1e-9 if network in (Biased, networks.Transformer) else 1e-11


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
@pytest.mark.parametrize("network", EVERY, **by_name)
def test_any_optimizer_after_balance(network, name):
    assert difference(network, name, *KINDS) <= bound(network)


@pytest.mark.parametrize("network", EVERY, **by_name)
def test_balanced_muon_from_every_start(network):
    assert difference(network, "BalancedMuon", *KINDS) <= bound(network)


@pytest.mark.parametrize("network", EVERY, **by_name)
def test_balanced_muon_when_a_copy_is_rescaled_in_mid_training(network, monkeypatch):
    """Before the third step and, after a round of upkeep, before the fifth."""
    monkeypatch.setattr(round, "EVERY", 3)
    options = {"steps": 6, "rescaled_at": (2, 4), "rescaled_first": False}
    assert difference(network, "BalancedMuon", "log-normal", "one unit", **options) <= bound(network)


@pytest.mark.parametrize("network", EVERY, **by_name)
def test_powers_of_two_give_the_same_bits(network, monkeypatch):
    """In fp32, at the start and in mid-training."""
    monkeypatch.setattr(round, "EVERY", 3)
    options = {"steps": 6, "rescaled_at": (2, 4), "dtype": torch.float32}
    assert difference(network, "BalancedMuon", "powers of two", **options) == 0


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"growth": 0.0}, {"nesterov": False}], ids=str)
def test_with_every_option(options):
    found = difference(cases.Residual, "BalancedMuon", "log-normal", steps=12, rescaled_at=(4,), **options)
    assert found <= 1e-11


def test_a_network_of_300_layers():
    """By any optimizer, too: weights are the same after balancing."""
    graph = traced(Deep)
    model, x = build(Deep)
    other = rescaled(model, graph, "log-normal")
    optimizers = [[BalancedMuon(m, graph)] for m in (model, other)]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p - q).norm() <= 1e-9 * q.norm()
    before = outputs(model, x).detach()
    after = train(model, optimizers[0], x, 4)
    found = train(other, optimizers[1], x, 4, {2: lambda: rescale(other, graph, "log-normal")})
    assert (after - before).norm() > 1e-2 * before.norm()
    assert (found - after).norm() <= 1e-9 * (after - before).norm()


# So that these tests can fail


FREE = [cases.Mlp, networks.Transformer, LowRank, ZeroHead, Explosive]


@pytest.mark.parametrize("network", FREE, **by_name)
def test_without_the_balance_steps_differ(network, monkeypatch):
    monkeypatch.setattr(upkeep.Upkeep, "_scale", lambda *_, **__: None)
    assert difference(network, "BalancedMuon", "log-normal") > 1e-2


@pytest.mark.parametrize("network", FREE, **by_name)
def test_without_undoing_steps_differ(network, monkeypatch):
    """Balancing again is not enough: upkeep lags the minimum a little."""
    monkeypatch.setattr(upkeep.Upkeep, "_undo_rescaling", lambda *_: False)
    options = {"rescaled_at": (2,), "rescaled_first": False}
    assert difference(network, "BalancedMuon", "log-normal", **options) > 1e-4


def test_without_a_bound_for_noise_a_bias_before_batch_norm_moves_by_rounding(monkeypatch):
    assert difference(Biased, "BalancedMuon", *KINDS, dtype=torch.float32) < 1e-4
    monkeypatch.setattr(balanced_muon, "NOISE", 0.0)
    assert difference(Biased, "BalancedMuon", *KINDS, dtype=torch.float32) > 1e-1


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_without_balance_optimizers_are_not_invariant(name, monkeypatch):
    monkeypatch.setattr(pathsgd, "balance", lambda *_: None)
    assert difference(cases.Mlp, name, "log-normal") > 1e-2
