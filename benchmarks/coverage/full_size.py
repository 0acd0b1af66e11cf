"""Decoders at full size on the meta device, where weights take no memory: seconds, and shares of weights."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import torch
from torch import nn

import pathsgd

# Private: the table counts what `print(graph)` does.
from pathsgd.graph.unit_classes import FIXED, UnitClasses, unit_classes_of

from .hugging_face import FULL_SIZE


@dataclass
class Counts:
    """Weights, and how many of them have a symmetry on one side at least, and on both."""

    weights: int = 0
    one_side: int = 0
    both_sides: int = 0
    without: int = 0
    """Parameters without any."""

    def add(self, other: Counts) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass
class FullSize:
    name: str
    seconds: float
    """Of one core, to trace the model and to find its units."""
    total: Counts
    matrices: Counts
    """Those between embeddings and head."""


def measure_full_size(name: str) -> FullSize:
    """Traces a model of that shape."""
    with torch.device("meta"):
        model, inputs = FULL_SIZE[name]()
    start = time.process_time()
    graph = pathsgd.trace(model, inputs)
    units = unit_classes_of(graph)
    seconds = time.process_time() - start
    ends = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    ends.add(id(model.get_output_embeddings().weight))
    total, inner = Counts(), Counts()
    for parameter_name, p in model.named_parameters():
        counts = _count(units, parameter_name, p.numel())
        total.add(counts)
        if p.dim() > 1 and id(p) not in ends:
            inner.add(counts)
    return FullSize(name, seconds, total, inner)


def _count(units: UnitClasses, name: str, weights: int) -> Counts:
    """Of one parameter, without writing out its entries where rows and columns tell all."""
    if name not in units.parameters:
        return Counts(weights, without=1)
    edge = units.parameters[name]
    head, tail = edge.head != FIXED, edge.tail != FIXED
    if all(1 in sizes for sizes in zip(head.shape, tail.shape, strict=True)):
        by_head, by_tail = float(head.double().mean()), float(tail.double().mean())
        both = by_head * by_tail
        one = by_head + by_tail - both
    else:
        one, both = (float(found.double().mean()) for found in (head | tail, head & tail))
    return Counts(weights, round(weights * one), round(weights * both), int(not one))
