"""Batch norms with fixed statistics, ``y = scale x + shift`` channel by channel, found in a graph.

In a graph one is a product and a sum with a bias or two, each a pass over all places. Taken together they are
one pass forward and one backward.
"""

from __future__ import annotations

from typing import NamedTuple

from pathsgd.graph.nodes import Add, Multiply, Shape, Source, Weight
from pathsgd.graph.path_graph import PathGraph


class ChannelNorm(NamedTuple):
    """The nodes of one."""

    source: int
    """What is normalised."""
    scale: int
    shifts: tuple[int, ...]


def find_channel_norms(graph: PathGraph) -> dict[int, ChannelNorm]:
    """By the node of the sum. Nothing else reads what is inside."""
    readers = graph.readers()
    inner = {k for k, own in enumerate(readers) if len(own) == 1 and k not in graph.ends}
    inner.difference_update(graph.outputs)
    found = {}
    for k, node in enumerate(graph.nodes):
        if not isinstance(node.operation, Add) or len(node.shape) < 3 or not inner.issuperset(node.inputs):
            continue
        scales = [j for j in node.inputs if isinstance(graph.nodes[j].operation, Multiply)]
        shifts = [j for j in node.inputs if isinstance(graph.nodes[j].operation, Source)]
        if len(scales) != 1 or not shifts or len(shifts) + 1 != len(node.inputs):
            continue
        source = graph.nodes[scales[0]].inputs[0]
        weights = [graph.nodes[j].operation.weight for j in node.inputs]  # type: ignore[union-attr]
        if graph.nodes[source].shape == node.shape and all(_is_by_channel(w, node.shape) for w in weights):
            found[k] = ChannelNorm(source, scales[0], tuple(shifts))
    return found


def _is_by_channel(weight: Weight, shape: Shape) -> bool:
    return weight.shape == (shape[1], *(1,) * (len(shape) - 2))
