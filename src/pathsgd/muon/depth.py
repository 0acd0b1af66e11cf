"""The number of layers that lie in sequence, and the part of a step that each of them takes.

The function moves by all layers together, about as independent steps add up: of n layers each takes a step
shorter by sqrt(n), once they are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pathsgd.graph.nodes import Add, Begin, Conv, Linear, Multiply, Source, Square, View, Weight
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.union_find import UnionFind

Across = Literal["nothing", "activations", "everything"]
"""Which ends of regions do not end a sequence."""

SHALLOW = 2.0
"""Layers up to which each takes the whole step, with nothing but activations and batch norms between them."""

SHALLOW_NETWORK = 10.0
"""Layers up to which each takes the whole step, with anything between them: layer norms and products of
activations bound what reaches the next layer. Measured on transformers, and on networks of depthwise
convolutions."""


class Ratios(NamedTuple):
    """Which part of a step is taken by what."""

    layers: float
    """Matrices and kernels."""
    norms: float
    """Weights and biases of norms, and other multipliers. All of what a layer gives passes them, so they move
    a deep network as layers do; the bias of a layer, which is one of its many inputs, moves it little."""


def find_ratios(graph: PathGraph) -> dict[int, Ratios]:
    """The parts of a step that layers and norms take, by region."""
    depths, whole = find_depths(graph, "activations"), find_depths(graph, "everything")
    ratios = {}
    for region, depth in depths.items():
        norms = min(1.0, (SHALLOW_NETWORK / whole[region]) ** 0.5)
        ratios[region] = Ratios(min(norms, (SHALLOW / depth) ** 0.5), norms)
    return ratios


def find_depths(graph: PathGraph, across: Across) -> dict[int, float]:
    """The most layers in sequence in a region and in those that are joined to it, by region; at least 1.

    A sum has the mean of its summands' number, since a residual branch adds little to what passes it by.
    Across everything the mean is over the deepest summand and those that it is computed from, which are true
    shortcuts; a condition on time is none. There a layer counts where it is used first: one that is unrolled
    over time is not deep.
    Batch norms are sums and products with weights in the graph, and end nothing. Depthwise convolutions end a
    sequence across activations.
    """
    activations = find_activations(graph) if across == "activations" else set()
    joined = UnionFind(max(graph.regions, default=-1) + 1)
    lengths: list[float] = []
    ended: list[float] = []  # the longest sequence before a node that does not go on in it
    known: set[Weight] = set()
    ancestors = _find_ancestors(graph) if across == "everything" else []
    for k, node in enumerate(graph.nodes):
        goes_on = across == "everything" or k in activations
        before = (*node.inputs, *graph.begins.get(k, ())) if goes_on else node.inputs
        for source in before:
            joined.union(graph.regions[k], graph.regions[source])
        before = _leave_out_sources(graph, before)
        if ancestors and isinstance(node.operation, Add) and before:
            before = _find_shortcuts(graph, ancestors, max(before, key=lengths.__getitem__), before)
        ended.append(max([0.0, *(ended[j] for j in before)]))
        if across == "activations" and isinstance(node.operation, Conv) and node.operation.is_depthwise:
            ended[k] = max([ended[k], *(lengths[j] for j in before)])
            before = ()
        own = [lengths[j] for j in before] or [0.0]
        length = sum(own) / len(own) if isinstance(node.operation, Add) else max(own)
        if isinstance(node.operation, (Linear, Conv)):
            length += across != "everything" or node.operation.weight not in known
            known.add(node.operation.weight)
        lengths.append(length)
    deepest: dict[int, float] = {}
    for k in graph.ends:
        group = joined.find(graph.regions[k])
        deepest[group] = max(deepest.get(group, 1.0), lengths[k], ended[k])
    return {region: deepest.get(joined.find(region), 1.0) for region in graph.regions}


def _find_ancestors(graph: PathGraph) -> list[int]:
    """The nodes that each node is computed from and itself, as bits."""
    ancestors: list[int] = []
    for k, node in enumerate(graph.nodes):
        bits = 1 << k
        for source in (*node.inputs, *graph.begins.get(k, ())):
            bits |= ancestors[source]
        ancestors.append(bits)
    return ancestors


def _find_shortcuts(
    graph: PathGraph, ancestors: Sequence[int], deepest: int, summands: Sequence[int]
) -> tuple[int, ...]:
    """The deepest summand, and those that it is computed from, as they are or added to others."""
    shortcuts, left = [deepest], [k for k in summands if k != deepest]
    while left:
        k = left.pop()
        while isinstance(graph.nodes[k].operation, View):
            (k,) = graph.nodes[k].inputs
        if ancestors[deepest] >> k & 1:
            shortcuts.append(k)
        elif isinstance(graph.nodes[k].operation, Add):
            left += _leave_out_sources(graph, graph.nodes[k].inputs)
    return tuple(shortcuts)


def _leave_out_sources(graph: PathGraph, nodes: Sequence[int]) -> tuple[int, ...]:
    return tuple(k for k in nodes if not isinstance(graph.nodes[k].operation, Source))


def find_activations(graph: PathGraph) -> set[int]:
    """The nodes that begin regions and are functions of one other unit each, by one operator or several."""
    activations: set[int] = set()
    origins: list[int] = []
    for k, node in enumerate(graph.nodes):
        before = _leave_out_sources(graph, (*node.inputs, *graph.begins.get(k, ())))
        pointwise = isinstance(node.operation, (Add, Multiply, Square)) or _is_pointwise(node.operation)
        origin = {origins[j] for j in before}
        origins.append(origin.pop() if pointwise and len(origin) == 1 else k)
        if _is_pointwise(node.operation) and origins[k] != k:
            activations.add(k)
    return activations


def _is_pointwise(operation: object) -> bool:
    return isinstance(operation, Begin) and operation.pointwise
