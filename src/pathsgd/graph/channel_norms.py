"""Batch norms with fixed statistics, ``y = scale x + shift`` channel by channel, found in a graph.

In a graph one is a product and a sum with a bias or two, each a pass over all places. Taken together they are
one pass forward and one backward.
"""

from __future__ import annotations

from typing import NamedTuple

from pathsgd.graph.image_convolutions import find_image_conv
from pathsgd.graph.nodes import Add, Conv, Multiply, Shape, Source, Weight
from pathsgd.graph.path_graph import PathGraph


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
            # Of convolutions by our kernels: torch's would copy an image inside of another one.
            border = _join([_see_forward(find_image_conv(graph, reader)) for reader in readers[k]])
            back = _join([_see_backward(find_image_conv(graph, source))])
            found[k] = ChannelNorm(source, scales[0], tuple(shifts), border, back)
    return found


def _see_forward(conv: Conv | None) -> Shape:
    """How far it sees beyond the edges."""
    return () if conv is None or conv.transposed else conv.padding


def _see_backward(conv: Conv | None) -> Shape:
    """How far its transpose does, if strides do not put zeros between places, too."""
    if conv is None or conv.transposed or set(conv.stride) != {1}:
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
