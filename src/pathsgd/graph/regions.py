"""Regions: connected parts of the graph between non-homogeneous operators, and the status of every
parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from pathsgd.graph.builder import Builder
from pathsgd.graph.nodes import Node, Weighted
from pathsgd.graph.path_graph import ParameterInfo, ParameterStatus
from pathsgd.graph.union_find import UnionFind

ALONE = "alone in its region: no other weight lies on its paths, so gamma = 1"


def find_regions(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The region of every node: its connected component, numbered in order of appearance."""
    connected = UnionFind(len(nodes))
    for k, node in enumerate(nodes):
        for source in node.inputs:
            connected.union(k, source)
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(connected.find(k), len(numbers)) for k in range(len(nodes)))


def longest_paths(nodes: Sequence[Node], regions: Sequence[int]) -> dict[int, int]:
    """For each region the largest number of edges with a parameter on one path."""
    depth: list[int] = []
    longest: dict[int, int] = {}
    for k, node in enumerate(nodes):
        own = isinstance(node.operation, Weighted) and node.operation.weight.parameter is not None
        depth.append(max((depth[source] for source in node.inputs), default=0) + own)
        longest[regions[k]] = max(longest.get(regions[k], 0), depth[k])
    return longest


def describe_parameters(
    model: nn.Module, builder: Builder, regions: Sequence[int], names: Mapping[str, str]
) -> dict[str, ParameterInfo]:
    """What the graph knows of each parameter. ``names`` maps every alias to the name it is described
    under."""
    described = {
        name: ParameterInfo(
            name,
            tuple(parameter.shape),
            parameter.requires_grad,
            aliases=tuple(alias for alias, first in names.items() if first == name != alias),
        )
        for name, parameter in model.named_parameters()
    }
    longest = longest_paths(builder.nodes, regions)
    for k, node in enumerate(builder.nodes):
        if not isinstance(node.operation, Weighted) or node.operation.weight.parameter is None:
            continue
        info = described[node.operation.weight.parameter.name]
        found = tuple(dict.fromkeys((*info.regions, regions[k])))
        roles = tuple(dict.fromkeys((*info.roles, node.operation.weight.role)))
        info = replace(info, regions=found, roles=roles, status=ParameterStatus.ALONE, reason=ALONE)
        if any(longest[region] > 1 for region in found):
            info = replace(info, status=ParameterStatus.NORMALISED, reason="")
        described[info.name] = info
    unread = {n: "what it leads to is on no path" for n in builder.read if not described[n].regions}
    for name, reason in {**unread, **builder.outside}.items():
        described[name] = replace(
            described[name], status=ParameterStatus.OUTSIDE, reason=f"outside: {reason}"
        )
    return described
