"""How many layers lie in sequence, and which part of a step each of them takes.

The function moves by all layers together, about as independent steps add up: of n layers each takes a step
shorter by sqrt(n), once they are many.
"""

from __future__ import annotations

from typing import Literal

from pathsgd.graph.nodes import Add, Begin, Conv, Linear, Multiply, Source, Square, Weight
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.union_find import UnionFind

Across = Literal["nothing", "activations", "everything"]
"""Which ends of regions do not end a sequence."""

SHALLOW = 2.0
"""Layers up to which each takes the whole step, with activations and batch norms between them."""

SHALLOW_NETWORK = 10.0
"""The same with anything between them: layer norms and products of activations bound what reaches the next
layer. Measured on transformers."""


def find_ratios(graph: PathGraph) -> dict[int, float]:
    """By region, which part of a step its layers take."""
    depths, whole = find_depths(graph, "activations"), find_depths(graph, "everything")
    return {
        region: float(min(1.0, SHALLOW / depth, SHALLOW_NETWORK / whole[region]) ** 0.5)
        for region, depth in depths.items()
    }


def find_depths(graph: PathGraph, across: Across) -> dict[int, float]:
    """By region, the most layers in sequence in it and in those that are joined to it; at least 1.

    A sum has the mean of its summands' number, since a residual branch adds little to what passes it by.
    Across everything a layer counts where it is used first: one that is unrolled over time is not deep.
    Batch norms are sums and products with weights in the graph, and end nothing.
    """
    activations = find_activations(graph)
    joined = UnionFind(max(graph.regions, default=-1) + 1)
    lengths: list[float] = []
    known: set[Weight] = set()
    for k, node in enumerate(graph.nodes):
        goes_on = across == "everything" or (across == "activations" and k in activations)
        before = (*node.inputs, *graph.begins.get(k, ())) if goes_on else node.inputs
        for source in before:
            joined.union(graph.regions[k], graph.regions[source])
        own = [lengths[j] for j in before if not isinstance(graph.nodes[j].operation, Source)] or [0.0]
        length = sum(own) / len(own) if isinstance(node.operation, Add) else max(own)
        if isinstance(node.operation, (Linear, Conv)):
            length += across != "everything" or node.operation.weight not in known
            known.add(node.operation.weight)
        lengths.append(length)
    deepest: dict[int, float] = {}
    for k in graph.ends:
        group = joined.find(graph.regions[k])
        deepest[group] = max(deepest.get(group, 1.0), lengths[k])
    return {region: deepest.get(joined.find(region), 1.0) for region in graph.regions}


def find_activations(graph: PathGraph) -> set[int]:
    """The nodes that begin regions and are functions of one other unit each, by one operator or several."""
    found: set[int] = set()
    origins: list[int] = []
    for k, node in enumerate(graph.nodes):
        before = (*node.inputs, *graph.begins.get(k, ()))
        before = tuple(j for j in before if not isinstance(graph.nodes[j].operation, Source))
        pointwise = isinstance(node.operation, (Add, Multiply, Square)) or _is_pointwise(node.operation)
        own = {origins[j] for j in before}
        origins.append(own.pop() if pointwise and len(own) == 1 else k)
        if _is_pointwise(node.operation) and origins[k] != k:
            found.add(k)
    return found


def _is_pointwise(operation: object) -> bool:
    return isinstance(operation, Begin) and operation.pointwise
