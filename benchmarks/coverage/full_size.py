"""Decoders at full size on the meta device, where weights take no memory: seconds, and shares of weights."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import torch
from torch import nn

import pathsgd

# Private: the table counts what `print(graph)` does.
from pathsgd.graph.protection import has_symmetry
from pathsgd.graph.unit_classes import unit_classes_of

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
        head, tail = has_symmetry(tuple(p.shape), units, parameter_name)
        counts = Counts(p.numel(), int((head | tail).sum()), int((head & tail).sum()))
        counts.without = int(counts.one_side == 0)
        total.add(counts)
        if p.dim() > 1 and id(p) not in ends:
            inner.add(counts)
    return FullSize(name, seconds, total, inner)
