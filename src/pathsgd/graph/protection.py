"""Which weights rescalings change, so that :func:`pathsgd.balance` protects them; which share paths, so that
:class:`pathsgd.PathSGD` does; why not the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pathsgd.graph.nodes import Begin, Conv, Linear, Multiply
from pathsgd.graph.running_statistics import has_statistics
from pathsgd.graph.structure import Structure
from pathsgd.graph.unit_classes import FIXED, UnitClasses, unit_classes_of

OTHER = "tied to what cannot be rescaled"
"""No end of paths is near: as a value that two ways lead to, of which one is fixed."""
NAMED = 4
"""Causes that are named, the most frequent first."""


def describe_protection(graph: Structure) -> str:
    """One sentence: how many units can be rescaled, how many weights that changes, and why not the others."""
    units = unit_classes_of(graph)
    total = sum(math.prod(info.shape) for info in graph.parameters.values())
    causes, _ = find_causes(graph, units)
    share = 1 - causes.total() / max(total, 1)
    count = f"{len(units.free):,} unit{'s' * (len(units.free) != 1)}"
    head = f"{count} can be rescaled; {share:.0%} of the weights lead into or out of one"
    large = [(cause, n / total) for cause, n in causes.most_common() if 200 * n >= total]
    if not large:
        return f"{head}."
    named = [f"{cause.removeprefix('outside: ')} ({share:.0%})" for cause, share in large[:NAMED]]
    return f"{head}, not the others: {', '.join(named)}{', ...' * (len(large) > NAMED)}."


def find_causes(graph: Structure, units: UnitClasses) -> tuple[Counter[str], Counter[str]]:
    """How many of the weights that no rescaling changes have which cause, behind them and before them. Of
    several causes the nearest counts."""
    behind: Counter[str] = Counter()
    before: Counter[str] = Counter()
    uses, readers, sources = _find_uses(graph), graph.readers(), [node.inputs for node in graph.nodes]
    for name, info in graph.parameters.items():
        head, tail = has_symmetry(info.shape, units, name)
        fixed = int((~head & ~tail).sum())
        if fixed and name in units.parameters and name in uses:
            behind[_find_end(graph, uses[name], readers)] += fixed
            before[_find_begin(graph, uses[name], sources)] += fixed
        elif fixed:
            behind[info.reason] += fixed
            before[info.reason] += fixed
    return behind, before


def explain_few_paths(graph: Structure) -> str | None:
    """Says what is wrong and what to do, if most weights of matrices and kernels share no path with another.

    Where a norm's weight is all that shares a path with a matrix, gamma hardly differs from a constant: that
    does not count. Embeddings and the last layer are left out: they may hold most of the weights, and a norm
    before or after them is the rule.
    """
    uses, readers, sources = _find_uses(graph), graph.readers(), [node.inputs for node in graph.nodes]
    total = shared = 0
    causes: Counter[str] = Counter()
    for name, info in graph.parameters.items():
        found, entries = uses.get(name, []), math.prod(info.shape)
        is_matrix = any(_is_matrix(graph, k) for k in found) if found else len(info.shape) > 1
        if not is_matrix or not info.trainable or "embedding" in info.roles:
            continue
        if _meets_matrix(graph, found, readers) or _meets_matrix(graph, found, sources):
            shared += entries
        else:
            end, begin = _find_end(graph, found, readers), _find_begin(graph, found, sources)
            if end == "output":
                continue
            reasons = (end, begin) if found else (info.reason,)
            named = {reason.removesuffix(" is not positively homogeneous") for reason in reasons}
            causes.update(dict.fromkeys(named - {"input", OTHER}, entries))
        total += entries
    if 2 * shared >= total:
        return None
    most = ", ".join(f"{cause} ({n:,} weights)" for cause, n in causes.most_common(NAMED))
    return (
        f"{f'only {shared / total:.0%}' if shared else 'none'} of the {total:,} trainable weights of "
        f"{graph.model}, embedding and last layer left out, share a path with the matrix of another layer: "
        f"{'the others' if shared else 'they'} are trained as without paths. What cuts them off: {most}. "
        "Take BalancedMuon, which trains these weights as well, or relu, leaky_relu or a squared relu as "
        "activations. print(optimizer.graph) has the reason for each parameter."
    )


def has_symmetry(shape: tuple[int, ...], units: UnitClasses, name: str) -> tuple[Tensor, Tensor]:
    """Whether there is one where an entry leads to, and where it comes from; by entry."""
    if name not in units.parameters:
        return torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    edge = units.parameters[name]
    return (edge.head != FIXED).expand(shape), (edge.tail != FIXED).expand(shape)


def _find_end(graph: Structure, start: list[int], readers: Sequence[Sequence[int]]) -> str:
    for k in _walk(graph, start, readers):
        operation = graph.nodes[k].operation
        if k in graph.ends:
            return graph.ends[k]
        if isinstance(operation, Multiply) and k not in start and has_statistics(operation.weight):
            return "batch norm by running statistics"
    return OTHER


def _find_begin(graph: Structure, start: list[int], sources: Sequence[Sequence[int]]) -> str:
    operations = (graph.nodes[k].operation for k in _walk(graph, start, sources))
    return next((operation.reason for operation in operations if isinstance(operation, Begin)), OTHER)


def _find_uses(graph: Structure) -> dict[str, list[int]]:
    """The nodes that use each parameter as weights."""
    uses: dict[str, list[int]] = {}
    for k, weight in graph.weights():
        if weight.parameter is not None:
            uses.setdefault(weight.parameter.name, []).append(k)
    return uses


def _is_matrix(graph: Structure, k: int) -> bool:
    operation = graph.nodes[k].operation
    return isinstance(operation, (Linear, Conv)) and operation.weight.parameter is not None


def _meets_matrix(graph: Structure, start: Sequence[int], following: Sequence[Sequence[int]]) -> bool:
    return any(_is_matrix(graph, other) for k in _walk(graph, start, following) for other in following[k])


def _walk(graph: Structure, start: Sequence[int], following: Sequence[Sequence[int]]) -> Iterator[int]:
    """The nodes from these on, nearest first, up to the next matrix."""
    waiting, known = list(start), set(start)
    for k in waiting:
        yield k
        for other in following[k]:
            if other not in known and not _is_matrix(graph, other):
                known.add(other)
                waiting.append(other)
