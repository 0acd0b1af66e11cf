"""The graph with a batch norm as what it is in training: an operator that paths end at."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from pathsgd.graph.nodes import Multiply, Source, Weight, number
from pathsgd.graph.regions import describe_uses, find_regions
from pathsgd.graph.structure import ParameterStatus, Structure

REASON = "batch norm divides by statistics of the batch"

Graph = TypeVar("Graph", bound=Structure)


def end_at_statistics(graph: Graph) -> Graph:
    """The graph in which paths end before every batch norm and begin anew after it, so that running
    statistics, which lag behind the weights and differ between processes, do not enter. Nodes keep their
    numbers."""
    nodes, ends, stopped = list(graph.nodes), dict(graph.ends), set()
    for k, node in enumerate(graph.nodes):
        match node.operation:
            case Multiply(weight) if has_statistics(weight):
                # One edge from the constant unit: what is normalised counts as 1.
                nodes[k] = replace(node, operation=Source(_without_statistics(weight)), inputs=())
                ends.setdefault(node.inputs[0], REASON)
                stopped.add(node.inputs[0])
            case Source(weight) if has_statistics(weight):
                # The shift by the running mean, which is nothing here; its parameter stays tied to the unit.
                nodes[k] = replace(node, operation=Source(replace(weight, factors=number(0).factors)))
    if nodes == list(graph.nodes):
        return graph
    regions = find_regions(nodes)
    described = describe_uses(graph.parameters, nodes, ends, regions)
    outside = {n: info for n, info in graph.parameters.items() if info.status is ParameterStatus.OUTSIDE}
    cut = tuple((k, graph.nodes[k].where, REASON) for k in ends if k not in graph.ends)
    return replace(
        graph, nodes=tuple(nodes), ends=ends, regions=regions, parameters={**described, **outside},
        boundaries=(*graph.boundaries, *cut), passed=graph.passed - stopped,
    )  # fmt: skip


def has_statistics(weight: Weight) -> bool:
    return any(factor.inverse_sigma is not None for factor in weight.factors)


def _without_statistics(weight: Weight) -> Weight:
    factors = tuple(factor for factor in weight.factors if factor.inverse_sigma is None)
    if weight.parameter is None and not factors:
        factors = number(1).factors
    return replace(weight, factors=factors)
