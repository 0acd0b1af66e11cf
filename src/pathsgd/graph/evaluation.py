"""The order in which a forward pass computes nodes: found once for what is wanted of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pathsgd.graph.channel_norms import ChannelNorm
from pathsgd.graph.nodes import Node
from pathsgd.graph.path_graph import PathGraph


class Step(NamedTuple):
    """One node to be computed."""

    k: int
    node: Node
    sources: tuple[int, ...]
    """The nodes that it is computed from."""
    used_up: tuple[int, ...]
    """Those that nothing reads after it."""


def order_steps(
    graph: PathGraph, wanted: frozenset[int], norms: Mapping[int, ChannelNorm]
) -> tuple[Step, ...]:
    """The nodes ``wanted`` and all before them, but for what is inside of ``norms``."""
    sources = {k: (norms[k].source,) if k in norms else node.inputs for k, node in enumerate(graph.nodes)}
    asked = set(wanted)
    for k in reversed(range(len(graph.nodes))):
        if k in asked:
            asked.update(sources[k])
    last_reader = {source: k for k in sorted(asked) for source in sources[k]}
    used_up: dict[int, list[int]] = {}
    for source, k in last_reader.items():
        used_up.setdefault(k, []).append(source)
    return tuple(Step(k, graph.nodes[k], sources[k], tuple(used_up.get(k, ()))) for k in sorted(asked))
