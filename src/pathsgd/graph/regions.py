"""Regions: connected parts of the graph between non-homogeneous operators, and who lives in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from pathsgd.graph.builder import Builder
from pathsgd.graph.nodes import Node, Weighted
from pathsgd.graph.path_graph import ParameterInfo

ALONE = "alone in its region: no other weight lies on its paths, so gamma = 1"
UNUSED = "not used by the forward pass"


def find_regions(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The region of every node: its connected component, numbered in order of appearance."""
    parent = list(range(len(nodes)))

    def root(k: int) -> int:
        while parent[k] != k:
            parent[k] = parent[parent[k]]
            k = parent[k]
        return k

    for k, node in enumerate(nodes):
        for source in node.inputs:
            parent[root(k)] = root(source)
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(root(k), len(numbers)) for k in range(len(nodes)))


def longest_paths(nodes: Sequence[Node], regions: Sequence[int]) -> dict[int, int]:
    """For each region the largest number of edges with a parameter on one path."""
    depth: list[int] = []
    longest: dict[int, int] = {}
    for k, node in enumerate(nodes):
        weighted = isinstance(node.operation, Weighted)
        own = weighted and node.operation.weight.parameter is not None  # type: ignore[union-attr]
        depth.append(max((depth[source] for source in node.inputs), default=0) + own)
        longest[regions[k]] = max(longest.get(regions[k], 0), depth[k])
    return longest


def describe_parameters(
    model: nn.Module, builder: Builder, regions: Sequence[int], names: Mapping[str, str]
) -> dict[str, ParameterInfo]:
    """Where each parameter stands, and whether it is path-normalised."""
    described = {
        name: ParameterInfo(name, tuple(parameter.shape), parameter.requires_grad, reason=UNUSED)
        for name, parameter in model.named_parameters()
    }
    for alias, name in names.items():
        if alias != name:
            info = described[name]
            described[name] = replace(info, aliases=(*info.aliases, alias))
    longest = longest_paths(builder.nodes, regions)
    for k, node in enumerate(builder.nodes):
        operation = node.operation
        if not isinstance(operation, Weighted):
            continue
        if operation.weight.parameter is None:
            continue
        info = described[operation.weight.parameter.name]
        found = tuple(dict.fromkeys((*info.regions, regions[k])))
        roles = tuple(dict.fromkeys((*info.roles, operation.weight.role)))
        normalised = any(longest[region] > 1 for region in found)
        described[info.name] = replace(
            info,
            regions=found,
            roles=roles,
            normalised=normalised,
            reason="" if normalised else ALONE,
        )
    for name in builder.read:
        if not described[name].regions:
            described[name] = replace(described[name], reason="outside: what it leads to is on no path")
    for name, reason in builder.outside.items():
        described[name] = replace(described[name], normalised=False, reason=f"outside: {reason}")
    return described
