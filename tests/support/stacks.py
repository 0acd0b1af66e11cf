"""Stacks of linear layers, which the fused implementations move, and short trainings of them."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn

import pathsgd
from pathsgd import PathSGD


def stack(*widths, bias=True, dtype=torch.float32):
    torch.manual_seed(sum(widths))
    layers = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(dtype)


_graphs = {}


def traced(model):
    """Its graph: one for all stacks of the same layers, since to trace one takes longer than to train it."""
    key = str(model), next(model.parameters()).dtype
    if key not in _graphs:
        _graphs[key] = pathsgd.trace(model)
    return _graphs[key]


def train(model, steps=3, width=None, between=None, **options):
    """The model after some steps, and its optimizer."""
    torch.manual_seed(0)
    parameter = next(model.parameters())
    x = torch.randn(20, model[0].in_features, dtype=parameter.dtype)
    y = torch.randint(model[-1].out_features, (20,))
    optimizer = PathSGD(model, traced(model), **options)
    for k in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        if between is not None:
            between(k, model, optimizer)
        optimizer.step()
    return model, optimizer


def rescaled(model):
    """A copy of a stack of three layers, its hidden units rescaled by powers of two."""
    other = copy.deepcopy(model)
    units = [(k, n) for k in (0, 2) for n in range(model[k].out_features)]
    pathsgd.rescale(other, traced(model), {(str(k), n): 2.0 ** ((n * 7 + k) % 21 - 10) for k, n in units})
    return other


def assert_close(found, expected, rtol=1e-6):
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (a - b).norm() <= rtol * b.norm(), name


def is_fused(optimizer):
    """Whether blocks or kernels moved the stack in the last step."""
    return bool(optimizer._chains._steps)
