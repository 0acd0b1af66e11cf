"""What a range check has to know of a graph: found once, whatever the weights are."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import NamedTuple

from pathsgd.graph.nodes import (
    Add,
    AxisMap,
    Conv,
    Linear,
    Multiply,
    Node,
    Operation,
    Reduce,
    Source,
    Square,
    Weight,
)
from pathsgd.graph.path_graph import ParameterStatus, PathGraph

PRODUCTS = (Source, Multiply, Square)
LOOKED = (*PRODUCTS, Linear, Conv, Add, AxisMap, Reduce)

BEGIN = -1
"""Stands for all nodes whose gamma_in is 1."""


class GammaProduct(NamedTuple):
    """Where gamma of a parameter is formed: gamma_in of these nodes times gamma_out of that one."""

    into: frozenset[int]
    """The nodes that are looked at and whose numbers arrive, through views; BEGIN if paths begin there."""
    out: int
    terms: float
    """The binary logarithm of the number of products that are added up, at most."""


@dataclass(frozen=True)
class CheckedNodes:
    """The nodes of one graph as a check sees them."""

    forward: frozenset[int]
    """Those that are looked at on the way there. Views move numbers only."""
    backward: frozenset[int]
    """Those on the way back."""
    summands: frozenset[int]
    """What is too small to matter in a sum may be lost: the sum is looked at instead. Of a chain of sums
    every second one is."""
    products: tuple[GammaProduct, ...]


_found: weakref.WeakKeyDictionary[PathGraph, CheckedNodes] = weakref.WeakKeyDictionary()


def checked_nodes(graph: PathGraph) -> CheckedNodes:
    """Those of a graph that passes run over."""
    if graph not in _found:
        looked = frozenset(k for k, node in enumerate(graph.nodes) if _is_looked_at(node.operation))
        summands, products = _find_summands(graph), tuple(_find_products(graph, looked))
        _found[graph] = CheckedNodes(looked - summands, looked, summands, products)
    return _found[graph]


def _is_looked_at(operation: Operation) -> bool:
    return isinstance(operation, LOOKED) and not (isinstance(operation, AxisMap) and operation.copies)


def _find_summands(graph: PathGraph) -> frozenset[int]:
    adds = {k for k, node in enumerate(graph.nodes) if isinstance(node.operation, Add)}
    found: set[int] = set()
    for k, readers in enumerate(graph.readers()):
        of_sum = k in adds and not found.isdisjoint(adds.intersection(graph.nodes[k].inputs))
        if readers and adds.issuperset(readers) and k not in graph.ends and not of_sum:
            found.add(k)
    return frozenset(found)


def _find_products(graph: PathGraph, looked: frozenset[int]) -> list[GammaProduct]:
    arriving: list[frozenset[int]] = []

    def arrives_at(node: Node) -> frozenset[int]:
        return frozenset().union(*(arriving[source] for source in node.inputs)) or frozenset([BEGIN])

    for k, node in enumerate(graph.nodes):
        arriving.append(frozenset([k]) if k in looked else arrives_at(node))
    of_parameter: dict[str, list[tuple[int, int]]] = {}
    for k, weight in graph.weights():
        if weight.parameter is not None:
            info = graph.parameters[weight.parameter.name]
            if info.status is not ParameterStatus.OUTSIDE:
                count = _count_terms(graph, graph.nodes[k], weight)
                of_parameter.setdefault(info.name, []).append((k, count))
    found = []
    for uses in of_parameter.values():
        terms = math.log2(max(1, sum(count for _, count in uses)))
        found += [GammaProduct(arrives_at(graph.nodes[k]), k, terms) for k, _ in uses]
    return found


def _count_terms(graph: PathGraph, node: Node, weight: Weight) -> int:
    """At how many places one entry of a parameter is used, at most."""
    assert weight.parameter is not None
    shape, edges = node.shape, math.prod(node.shape)
    if isinstance(node.operation, Linear):
        edges = math.prod(shape[:-1]) * math.prod(weight.shape)
    elif isinstance(node.operation, Conv):
        places = [math.prod(s[:1] + s[2:]) for s in (shape, graph.nodes[node.inputs[0]].shape)]
        edges = max(places) * math.prod(weight.shape)
    # A view of the parameter may leave out entries, or repeat them.
    own = graph.parameters[weight.parameter.name].shape
    entries = min(math.prod(own), math.prod(weight.parameter.shape))
    return -(-edges // max(1, entries))
