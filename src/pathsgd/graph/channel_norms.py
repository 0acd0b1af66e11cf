"""Batch norms with fixed statistics, ``y = scale x + shift`` channel by channel, found in a graph.

In a graph one is a product and a sum with a bias or two, each a pass over all places. Taken together they are
one pass forward and one backward.
"""

from __future__ import annotations

from typing import NamedTuple

from pathsgd.graph.nodes import Add, Conv, Multiply, Shape, Source, Weight
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.weight_plan import is_of_one_image


class ChannelNorm(NamedTuple):
    """The nodes of one."""

    source: int
    """What is normalised."""
    scale: int
    shifts: tuple[int, ...]
    border: Shape = ()
    """How many zeros the convolutions that read it see beyond its edges; none if they see none."""
    border_back: Shape = ()
    """The same of what flows back into the convolution that is normalised."""


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
            convs = [_find_conv(graph, reader) for reader in readers[k]]
            border = _join([conv.padding for conv in convs if conv is not None])
            normalised = _find_conv(graph, source)
            back = _join([] if normalised is None else [_see_backward(normalised)])
            found[k] = ChannelNorm(source, scales[0], tuple(shifts), border, back)
    return found


def _find_conv(graph: PathGraph, k: int) -> Conv | None:
    """The convolution at node k, if kernels of ours compute it: torch's would copy an image inside of another
    one."""
    node = graph.nodes[k]
    if not isinstance(node.operation, Conv) or node.operation.transposed:
        return None
    own = is_of_one_image(node.operation, graph.nodes[node.inputs[0]].shape, node.shape[2:])
    return node.operation if own else None


def _see_backward(conv: Conv) -> Shape:
    """How far its transpose sees beyond the edges, if strides do not put zeros between places, too."""
    if set(conv.stride) != {1}:
        return ()
    taps = conv.weight.shape[2:]
    sizes = zip(conv.dilation, taps, conv.padding, strict=True)
    return tuple(max(0, dilation * (n - 1) - padding) for dilation, n, padding in sizes)


def _join(borders: list[Shape]) -> Shape:
    """The largest on each axis; none if there are no zeros."""
    joined = tuple(map(max, zip(*filter(None, borders), strict=True)))
    return joined if any(joined) else ()


def _is_by_channel(weight: Weight, shape: Shape) -> bool:
    return weight.shape == (shape[1], *(1,) * (len(shape) - 2))
