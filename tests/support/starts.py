"""Networks whose start has no minimum of its own, or is far from any: zeros, depth, squares, ties. These and
all others that can be rescaled, with rescaled copies of them."""

from __future__ import annotations

import copy
import functools
import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathsgd
from pathsgd.balancing.rescale import apply_factors
from pathsgd.graph.unit_classes import FIXED, unit_classes_of
from support import cases, networks, symmetries
from support.networks import Biased


def stack(*widths, bias=True):
    layers = [m for sizes in itertools.pairwise(widths) for m in (nn.Linear(*sizes, bias), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


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


class ZeroNorm(nn.Module):
    """Residual branches whose gains are zero, wholly and in part; a layer that is used twice."""

    example = (4, 6)
    norm: type[nn.Module] = nn.LayerNorm

    def __init__(self):
        super().__init__()
        self.tied, self.first, self.branch = nn.Linear(6, 6), self.norm(6), nn.Linear(6, 6)
        self.gain, self.head = nn.Parameter(torch.zeros(6)), nn.Linear(6, 2)
        with torch.no_grad():
            self.first.weight[:3] = 0
            self.first.bias[2:4] = 0.5

    def forward(self, x):
        x = F.relu(self.tied(F.relu(self.tied(x))))
        x = x + F.relu(self.first(x))
        return self.head(x + self.gain * F.relu(self.branch(x)))


class ZeroBatchNorm(ZeroNorm):
    norm = nn.BatchNorm1d


class DeadChain(nn.Sequential):
    """Unit 0 of the first layer has no input and leads to unit 0 of the second, which leads nowhere; units 1
    have no input, units 2 no output."""

    example = (4, 6)

    def __init__(self):
        super().__init__(*stack(6, 8, 7, 3))
        with torch.no_grad():
            self[0].weight[:2] = self[0].bias[:2] = 0
            self[2].weight[0, 1:] = self[2].bias[0] = self[4].weight[:, 0] = 0
            self[2].weight[1, 2:] = self[2].bias[1] = 0
            self[2].weight[:, 2] = self[4].weight[:, 2] = 0


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
    Biased, LowRank, ZeroHead, ZeroGain, ZeroNorm, ZeroBatchNorm, DeadChain, Squares, Explosive, TiedLayers,
    TiedTable,
]  # fmt: skip


NETWORKS = [*cases.RESCALABLE, *networks.NETWORKS, *STARTS, *symmetries.NETWORKS]
by_name = {"ids": lambda network: network.__module__.rpartition(".")[2] + "-" + network.__name__}


def build(network):
    """(model in fp64 and in eval mode, a batch), the same every time."""
    if network in networks.NETWORKS:
        return networks.build(network)
    if network in cases.CASES:
        model = cases.build(network).eval()
        x = model.example(4)
        return model, torch.arange(x.numel()).reshape(x.shape) % 3 if network is cases.Embedded else x
    torch.manual_seed(3)
    model, x = network().double().eval(), torch.randn(network.example, dtype=torch.float64)
    return model, torch.arange(20).reshape(4, 5) % 7 if network is TiedTable else x


@functools.cache
def traced(network):
    """The graph of ``build(network)``: tracing takes longer than most tests."""
    if network in networks.NETWORKS:
        return networks.traced(network)
    with torch.random.fork_rng(devices=[]):
        model, x = build(network)
    return pathsgd.trace(model, x[:1])


KINDS = ["log-normal", "powers of two", "one unit"]
"""Rescalings: of all units by factors of up to 2^30, or of one by 1e-12."""


def draw_factors(kind, count, most=30):
    """The factors of all classes."""
    generator = torch.Generator().manual_seed(1)
    if kind == "one unit":
        factors = torch.ones(count, dtype=torch.float64)
        factors[1 + int(torch.randint(count - 1, (), generator=generator))] = 1e-12
        return factors
    drawn = (most / 3 * torch.randn(count, generator=generator, dtype=torch.float64)).clamp(-most, most)
    return torch.exp2(drawn.round() if kind == "powers of two" else drawn)


def rescale(model, graph, kind, most=30):
    units = unit_classes_of(graph)
    apply_factors(graph.tensors(model), units, draw_factors(kind, units.count, most))


def rescaled(model, graph, kind, most=30):
    """A copy of the model."""
    copied = copy.deepcopy(model)
    rescale(copied, graph, kind, most)
    return copied


def balanced(model, graph, p=2, q=2):
    """A copy of the model."""
    model = copy.deepcopy(model)
    pathsgd.balance(model, graph, p, q)
    return model


def largest_difference(a, b):
    """The largest over all weights, each relative to itself."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(((p - q).abs() / p.abs().clamp(min=1e-300)).max().item() for p, q in pairs if p.numel())


def are_equal(a, b):
    return all(map(torch.equal, a.parameters(), b.parameters()))


def computes_the_same(a, b, x):
    expected, result = (m(x)[0] if isinstance(m(x), tuple) else m(x) for m in (a, b))
    return bool((result - expected).abs().max() <= 1e-12 * expected.abs().max())


NORMS = nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.RMSNorm


def measure_norms(model, graph):
    """The largest gain that leads into a class, or where that is 0 the bias, by class; for each norm or all
    that share some."""
    units = unit_classes_of(graph)
    norms = []
    for name, module in model.named_modules():
        own = {}
        for leaf, value in module.named_parameters(recurse=False) if isinstance(module, NORMS) else ():
            heads = units.parameters[f"{name}.{leaf}"].head.tolist()
            for k, x in zip(heads, value.abs().tolist(), strict=True):
                own[k] = max((x, 0) if leaf == "weight" else (0, x), own.get(k, (0, 0)))
        own.pop(FIXED, None)
        for other in [other for other in norms if own.keys() & other.keys()]:
            norms.remove(other)
            own = {k: max(own.get(k, (0, 0)), other.get(k, (0, 0))) for k in own.keys() | other.keys()}
        if own:
            norms.append(own)
    return [{k: gain or bias for k, (gain, bias) in norm.items()} for norm in norms]


def measure_flow(model, graph):
    """Sums of squares over the weights that grow with the factor of every free class, and that shrink."""
    units = unit_classes_of(graph)
    terms = units.relations.terms
    arriving, leaving = torch.zeros(2, units.count, dtype=torch.float64)
    for n, edge in units.parameters.items():
        square = graph.tensors(model)[n].detach().square()
        arriving.index_add_(0, edge.head.expand(square.shape).flatten(), square.flatten())
        leaving.index_add_(0, edge.tail.expand(square.shape).flatten(), square.flatten())
    grows, shrinks = torch.zeros(2, units.count, dtype=torch.float64)
    for of, by, power in zip(*map(Tensor.tolist, (terms.of, terms.by, terms.power)), strict=True):
        up, down = (arriving, leaving) if power > 0 else (leaving, arriving)
        grows[by] += abs(power) * up[of]
        shrinks[by] += abs(power) * down[of]
    return grows[units.free], shrinks[units.free]
