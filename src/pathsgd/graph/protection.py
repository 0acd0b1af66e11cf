"""Which weights rescalings change, so that :func:`pathsgd.balance` protects them; why not the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pathsgd.graph.nodes import Begin, Conv, Linear, Multiply
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.unit_classes import FIXED, UnitClasses, unit_classes_of

OTHER = "tied to what cannot be rescaled"
"""No end of paths is near: as a value that two ways lead to, of which one is fixed."""
NAMED = 4
"""Causes that are named, the most frequent first."""


def describe_protection(graph: PathGraph) -> str:
    """One sentence: how many units can be rescaled, how many weights that changes, and why not the others."""
    units = unit_classes_of(graph)
    total = sum(math.prod(info.shape) for info in graph.parameters.values())
    causes, _ = find_causes(graph, units)
    share = 1 - causes.total() / max(total, 1)
    count = f"{len(units.free):,} unit{'s' * (len(units.free) != 1)}"
    head = f"{count} can be rescaled; {share:.0%} of the weights lead into or out of one"
    if not causes:
        return f"{head}."
    named = [f"{cause} ({n / total:.0%})" for cause, n in causes.most_common(NAMED)]
    return f"{head}, not the others: {', '.join(named)}{', ...' * (len(causes) > NAMED)}."


def find_causes(graph: PathGraph, units: UnitClasses) -> tuple[Counter[str], Counter[str]]:
    """How many of the weights that no rescaling changes have which cause, behind them and before them. Of
    several causes the nearest counts."""
    behind: Counter[str] = Counter()
    before: Counter[str] = Counter()
    uses: dict[str, list[int]] = {}
    for k, weight in graph.weights():
        if weight.parameter is not None:
            uses.setdefault(weight.parameter.name, []).append(k)
    readers, sources = graph.readers(), [node.inputs for node in graph.nodes]
    for name, info in graph.parameters.items():
        head, tail = has_symmetry(info.shape, units, name)
        fixed = int((~head & ~tail).sum())
        if fixed and name in units.parameters and uses.get(name):
            behind[_find_end(graph, uses[name], readers)] += fixed
            before[_find_begin(graph, uses[name], sources)] += fixed
        elif fixed:
            behind[info.reason] += fixed
            before[info.reason] += fixed
    return behind, before


def has_symmetry(shape: tuple[int, ...], units: UnitClasses, name: str) -> tuple[Tensor, Tensor]:
    """Whether there is one where an entry leads to, and where it comes from; by entry."""
    if name not in units.parameters:
        return torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    edge = units.parameters[name]
    return (edge.head != FIXED).expand(shape), (edge.tail != FIXED).expand(shape)


def _find_end(graph: PathGraph, start: list[int], readers: Sequence[Sequence[int]]) -> str:
    for k in _walk(graph, start, readers):
        operation = graph.nodes[k].operation
        if k in graph.ends:
            return graph.ends[k]
        factors = operation.weight.factors if isinstance(operation, Multiply) and k not in start else ()
        if any(factor.inverse_sigma is not None for factor in factors):
            return "batch norm by running statistics"
    return OTHER


def _find_begin(graph: PathGraph, start: list[int], sources: Sequence[Sequence[int]]) -> str:
    operations = (graph.nodes[k].operation for k in _walk(graph, start, sources))
    return next((operation.reason for operation in operations if isinstance(operation, Begin)), OTHER)


def _walk(graph: PathGraph, start: Sequence[int], following: Sequence[Sequence[int]]) -> Iterator[int]:
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
