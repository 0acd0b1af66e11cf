"""Models that cannot be traced as a whole, since what they do depends on values."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F


def mlp(width=4):
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width))


class Branching(nn.Module):
    """Cannot be traced as a whole."""

    def __init__(self):
        super().__init__()
        self.part = mlp()

    def forward(self, x):
        y = self.body(x)
        return y if y.sum() > 1e9 else y + 1

    def body(self, x):
        return self.part(x)


class Experts(Branching):
    """Every row goes to two of four experts."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 4), nn.ModuleList(mlp() for _ in range(4))

    def body(self, x):
        weights, chosen = self.gate(x).softmax(1).topk(2)
        y = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            rows, k = torch.nonzero(chosen == e, as_tuple=True)
            y.index_add_(0, rows, weights[rows, k, None] * self.experts[e](x[rows]))
        return self.part(y)


class EarlyExperts(Experts):
    """An expert without rows is not run, any other on all rows."""

    def body(self, x):
        y, chosen = torch.zeros_like(x), self.gate(x).argmax(1)
        for k, expert in enumerate(self.experts):
            if (chosen == k).any():
                y = torch.where((chosen == k)[:, None], expert(x), y)
        return self.part(y)


class Cache:
    def __init__(self):
        self.seen = []


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v, self.o = nn.Linear(4, 4), mlp(), nn.Linear(4, 4)

    def forward(self, x, cache, scale):
        v = self.v(x)
        cache.seen.append(v)
        return self.o((self.q(x) @ x.mT * scale).softmax(-1) @ v)


class GivenAnObject(Branching):
    """Values leave through it."""

    def __init__(self):
        super().__init__()
        self.part = Attention()

    def body(self, x):
        cache = Cache()
        return self.part(x, cache=cache, scale=0.5) + cache.seen[0].relu()


class Twice(Branching):
    def body(self, x):
        return self.part(self.part(x).sigmoid())


class OtherShapes(Branching):
    def body(self, x):
        return self.part(x) + self.part(x[:1])


class Flagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in "abc")
        self.straight = True

    def forward(self, x, straight=True):
        x = self.a(x).relu()
        return self.b(x) if straight and self.straight else self.c(x.sigmoid())


class OtherArguments(Branching):
    def __init__(self):
        super().__init__()
        self.part = Flagged()

    def body(self, x):
        return self.part(x) + self.part(x, straight=False)


class Tied(Branching):
    """Two parts share a weight."""

    def __init__(self):
        super().__init__()
        self.other = mlp()
        self.other[2].weight = self.part[2].weight

    def body(self, x):
        return self.other(self.part(x).sigmoid())


class WritesItsInput(Branching):
    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.ReLU(inplace=True), *mlp())

    def body(self, x):
        x = x * 2
        return self.part(x) + x


class Statistics(Branching):
    """Writes buffers and draws random numbers."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(8)
        self.part = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Dropout(), nn.Linear(8, 4))

    def body(self, x):
        return self.part(x) + random.random() * 0


SOUND = (
    Branching, Experts, EarlyExperts, GivenAnObject, Twice, OtherShapes, Tied, WritesItsInput, Statistics
)  # fmt: skip


class ReadsAWeight(Branching):
    def body(self, x):
        return self.part(x) + F.linear(x, self.part[0].weight).sum(1, keepdim=True)


class ReadsAView(Branching):
    def __init__(self):
        super().__init__()
        self.double()  # which makes the memory anew
        self.kept = [self.part[0].weight.detach().mT]

    def body(self, x):
        return self.part(x) + (x @ self.kept[0]).sum(1, keepdim=True)


class CallsForward(Branching):
    def body(self, x):
        return self.part(x) + self.part[0].forward(x).sum(1, keepdim=True)


class GivesAWeight(Branching):
    """A module is given a parameter of its own."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x, weight):
            return self.b(self.a(x).relu()) + F.linear(x, weight).sum(1, keepdim=True)

    def __init__(self):
        super().__init__()
        self.part = self.Scaled()

    def body(self, x):
        return self.part(x, self.part.a.weight)


class Keeps(nn.Module):
    """Keeps a value inside it for others."""

    def __init__(self, keep):
        super().__init__()
        self.a, self.b, self.keep = nn.Linear(4, 8), nn.Linear(8, 4), keep

    def forward(self, x):
        h = self.a(x).relu()
        self.keep(self, h)
        return self.b(h)


class KeepsAnAttribute(Branching):
    def __init__(self):
        super().__init__()
        self.part = Keeps(lambda module, h: setattr(module, "h", h))

    def body(self, x):
        return self.part(x) + self.part.h.sum(1, keepdim=True)


class KeepsInMemory(Branching):
    """Written in place to a tensor that is there before."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(6, 8, dtype=torch.float64)
        self.part = Keeps(lambda _, h: self.kept.copy_(h))

    def body(self, x):
        return self.part(x) + self.kept.sum(1, keepdim=True)


class KeepsByAHook(Branching):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.part[1].register_forward_hook(lambda module, args, result: self.seen.append(result))

    def body(self, x):
        self.seen.clear()
        return self.part(x) + self.seen[0].sum(1, keepdim=True)


class SetsAnAttribute(Branching):
    """What a module does depends on what its parent has set."""

    def __init__(self):
        super().__init__()
        self.part = Flagged()

    def body(self, x):
        self.part.straight = False
        y = self.part(x)
        self.part.straight = True
        return y


class SetsATensor(Branching):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), None

        def forward(self, x):
            x = self.a(x).relu()
            return self.b(x if self.gate is None else x * self.gate.relu())

    def __init__(self):
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), self.Gated()

    def body(self, x):
        self.part.gate = self.first(x)
        y = self.part(x)
        self.part.gate = None
        return y


class OtherNumbers(Branching):
    """The same operators, with other numbers."""

    class Power(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.power = nn.Linear(4, 8), nn.Linear(8, 4), 2

        def forward(self, x):
            return self.b(self.a(x).relu() ** self.power)

    def __init__(self):
        super().__init__()
        self.part = self.Power()

    def body(self, x):
        self.part.power = 2
        y = self.part(x)
        self.part.power = 3
        return y + self.part(x)


class Returns(Branching):
    """A parameter is part of what it returns."""

    def forward(self, x):
        return super().forward(x), self.part[0].bias


class OtherInTraining(Branching):
    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 8), self.Bounded(), nn.Linear(8, 4))

    class Bounded(nn.ReLU):
        def forward(self, x):
            return x.tanh() if self.training else x.relu()


BETRAYING = (
    ReadsAWeight, ReadsAView, CallsForward, GivesAWeight, KeepsAnAttribute, KeepsInMemory, KeepsByAHook,
    SetsAnAttribute, SetsATensor, OtherArguments, OtherNumbers,
)  # fmt: skip
