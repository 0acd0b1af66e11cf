"""Networks with their rescaled copies, optimizers for them, and short trainings."""

from __future__ import annotations

import copy

import torch

import pathsgd
from pathsgd import PathNormalized, PathSGD
from pathsgd.balancing.rescale import apply_factors
from pathsgd.graph.unit_classes import unit_classes_of
from support.networks import build, traced

STEPS = 5


# Any p, and decay and momentum of every kind.
OPTIMIZERS = {
    "p=1": lambda m, g: PathSGD(m, g, lr=1e-5, p=1),
    "p=1.5": lambda m, g: PathSGD(m, g, lr=1e-5, p=1.5),
    "p=2": lambda m, g: PathSGD(m, g, lr=1e-4),
    "p=4": lambda m, g: PathSGD(m, g, lr=1e-5, p=4),
    "momentum": lambda m, g: PathSGD(m, g, lr=1e-5, momentum=0.9),
    "nesterov": lambda m, g: PathSGD(m, g, lr=1e-5, momentum=0.9, nesterov=True, fused=False),
    "decay": lambda m, g: PathSGD(m, g, lr=1e-4, momentum=0.5, weight_decay=0.1),
    "Adagrad": lambda m, g: PathNormalized(torch.optim.Adagrad, m, g, lr=1e-3),
    "Adam": lambda m, g: PathNormalized(torch.optim.Adam, m, g, lr=1e-4),
    "AdamW": lambda m, g: PathNormalized(torch.optim.AdamW, m, g, lr=1e-4, weight_decay=0.1),
    "RMSprop": lambda m, g: PathNormalized(torch.optim.RMSprop, m, g, lr=1e-5, momentum=0.5),
    "clipped": lambda m, g: clipped(PathSGD(m, g, lr=1e-3, momentum=0.9)),
    "coupled": lambda m, g: PathNormalized(torch.optim.SGD, m, g, lr=1e-4, momentum=0.9, weight_decay=0.1),
}


def clipped(optimizer, max_norm=0.01):
    """Clips before every step, by the invariant norm."""

    def clip(*_):
        pathsgd.clip_path_grad_norm_(optimizer, max_norm)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def pair(network, dtype, powers_of_two):
    """(model, rescaled copy, graph, input): every unit scaled by 1e-3 to 1e3, or by 2^-10 to 2^10, but for
    queries and keys: paths end at their product, so gamma does not follow."""
    model, x = build(network, dtype)
    graph = traced(network, dtype)
    units = unit_classes_of(graph)
    generator = torch.Generator().manual_seed(1)
    count = units.count
    if powers_of_two:
        factors = torch.exp2(torch.randint(-10, 11, (count,), generator=generator).double())
    else:
        factors = 10 ** (6 * torch.rand(count, generator=generator, dtype=torch.float64) - 3)
    factors[units.relations.related] = 1
    copied = copy.deepcopy(model)
    apply_factors(graph.tensors(copied), units, factors)
    return model, copied, graph, x


def train(model, optimizer, x, steps=STEPS):
    targets = torch.arange(len(x)) % 2
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(1), targets)
        loss.backward()
        optimizer.step()
    return model(x).detach()


def backward(model, x):
    model.zero_grad()
    model(x).pow(2).mean().backward()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def unchanged(model, before):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def model_of(optimizer):
    """The module that an optimizer was made with, or the copy of it that came along with a copy."""
    lazy_graph = getattr(optimizer, "_lazy_graph", None) or optimizer.gammas.lazy_graph
    return lazy_graph.model
