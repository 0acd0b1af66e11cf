"""Why weights have no symmetry: what the values they lead into meet, and what the values they read come
from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import pathsgd
from pathsgd.graph.nodes import Conv, Linear, Multiply, Weighted
from pathsgd.graph.unit_classes import FIXED, UnitClasses

OTHER = "tied to what cannot be rescaled"
"""No end of paths is near: as a value that two ways lead to, of which one is fixed."""


def find_causes(graph: pathsgd.PathGraph, units: UnitClasses) -> tuple[Counter[str], Counter[str]]:
    """How many of the weights without any symmetry have which cause, behind them and before them. Of
    several causes the nearest counts."""
    behind: Counter[str] = Counter()
    before: Counter[str] = Counter()
    uses: dict[str, list[int]] = {}
    for k, node in enumerate(graph.nodes):
        if isinstance(node.operation, Weighted) and node.operation.weight.parameter is not None:
            uses.setdefault(node.operation.weight.parameter.name, []).append(k)
    readers, sources = graph.readers(), [node.inputs for node in graph.nodes]
    for name, info in graph.parameters.items():
        fixed = count_fixed(info.shape, units, name)
        if not fixed:
            continue
        if name not in units.parameters or not uses.get(name):
            behind[info.reason] += fixed
            before[info.reason] += fixed
            continue
        behind[_find_end(graph, uses[name], readers)] += fixed
        before[_find_begin(graph, uses[name], sources)] += fixed
    return behind, before


def count_fixed(shape: tuple[int, ...], units: UnitClasses, name: str) -> int:
    """The number of entries that no rescaling changes."""
    head, tail = has_symmetry(shape, units, name)
    return int((~head & ~tail).sum())


def has_symmetry(shape: tuple[int, ...], units: UnitClasses, name: str) -> tuple[Tensor, Tensor]:
    """Whether there is one where an entry leads to, and where it comes from; by entry."""
    if name not in units.parameters:
        return torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    edge = units.parameters[name]
    return (edge.head != FIXED).expand(shape), (edge.tail != FIXED).expand(shape)


def _find_end(graph: pathsgd.PathGraph, start: list[int], readers: Sequence[Sequence[int]]) -> str:
    for k in _walk(graph, start, readers):
        if k in graph.ends:
            return graph.ends[k]
        if k not in start and _has_running_statistics(graph, k):
            return "batch norm by running statistics"
    return OTHER


def _has_running_statistics(graph: pathsgd.PathGraph, k: int) -> bool:
    operation = graph.nodes[k].operation
    return isinstance(operation, Multiply) and any(
        factor.inverse_sigma is not None for factor in operation.weight.factors
    )


def _find_begin(graph: pathsgd.PathGraph, start: list[int], sources: Sequence[Sequence[int]]) -> str:
    for k in _walk(graph, start, sources):
        if not graph.nodes[k].inputs and hasattr(graph.nodes[k].operation, "reason"):
            return graph.nodes[k].operation.reason
    return OTHER


def _walk(
    graph: pathsgd.PathGraph, start: Sequence[int], following: Sequence[Sequence[int]]
) -> Iterator[int]:
    """The nodes from these on, nearest first, up to the next matrix."""
    waiting, known = list(start), set(start)
    for k in waiting:
        yield k
        for other in following[k]:
            operation = graph.nodes[other].operation
            is_matrix = isinstance(operation, (Linear, Conv)) and operation.weight.parameter is not None
            if other not in known and not is_matrix:
                known.add(other)
                waiting.append(other)
