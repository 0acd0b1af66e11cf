"""Regions: connected parts of the graph between non-homogeneous operators, and the status of every
parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from pathsgd.graph.builder import Builder
from pathsgd.graph.nodes import Node, Weighted
from pathsgd.graph.path_lengths import find_alone
from pathsgd.graph.structure import ParameterInfo, ParameterStatus
from pathsgd.graph.union_find import UnionFind

ZEROS = "multiplied by nothing but zeros, so no unit is rescaled; pass an example of more steps"
ALONE = "alone on its paths, so optimizers take gamma = 1"


def find_regions(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The region of every node: its connected component, numbered in order of appearance."""
    connected = UnionFind(len(nodes))
    for k, node in enumerate(nodes):
        for source in node.inputs:
            connected.union(k, source)
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(connected.find(k), len(numbers)) for k in range(len(nodes)))


def describe_parameters(
    model: nn.Module, builder: Builder, regions: Sequence[int], names: Mapping[str, str]
) -> dict[str, ParameterInfo]:
    """Returns what the graph knows of each parameter. ``names`` maps every alias to the name it is described
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
    described = describe_uses(described, builder.nodes, builder.ends, regions)
    unread = {n: "what it leads to is on no path" for n in builder.read if not described[n].regions}
    unread |= dict.fromkeys(builder.unused & unread.keys(), ZEROS)
    for name, reason in {**unread, **builder.outside}.items():
        described[name] = replace(
            described[name], status=ParameterStatus.OUTSIDE, reason=f"outside: {reason}", alone=0
        )
    return described


def describe_uses(
    parameters: Mapping[str, ParameterInfo],
    nodes: Sequence[Node],
    ends: Mapping[int, str],
    regions: Sequence[int],
) -> dict[str, ParameterInfo]:
    """The parameters with what they are used as, in which regions, and what shares their paths."""
    described = {name: replace(info, regions=(), roles=()) for name, info in parameters.items()}
    for k, node in enumerate(nodes):
        if isinstance(node.operation, Weighted) and node.operation.weight.parameter is not None:
            info = described[node.operation.weight.parameter.name]
            own_regions = tuple(dict.fromkeys((*info.regions, regions[k])))
            roles = tuple(dict.fromkeys((*info.roles, node.operation.weight.role)))
            described[info.name] = replace(info, regions=own_regions, roles=roles)
    shapes = {name: info.shape for name, info in described.items()}
    for name, is_alone in find_alone(nodes, ends, shapes).items():
        entries = math.prod(shapes[name])
        alone = int(is_alone.sum()) * entries // max(is_alone.numel(), 1)
        status, reason = ParameterStatus.NORMALISED, ""
        if alone == entries:
            status, reason = ParameterStatus.ALONE, ALONE
        described[name] = replace(described[name], status=status, reason=reason, alone=alone)
    return described
