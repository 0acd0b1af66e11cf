"""Convolutions of one image, for which there are GPU kernels of our own."""

from __future__ import annotations

import math

from pathsgd.graph.nodes import Conv, Shape
from pathsgd.graph.path_graph import PathGraph

MOST_TERMS = 1 << 22
"""Of the sums at all places for one output, up to which our kernels are faster than cudnn's."""


def is_of_one_image(operation: Conv, x: Shape, size: Shape) -> bool:
    """Whether a convolution of x, or its transpose, whose result has this size, is of one image that is not
    too large."""
    if len(x) != 4 or x[0] != 1 or operation.groups != 1:
        return False
    places = math.prod(x[2:] if operation.transposed else size)
    taps = math.prod(operation.weight.shape[2:])
    return places * taps * operation.weight.shape[1] <= MOST_TERMS


def is_image_convolution(graph: PathGraph, k: int) -> bool:
    """Whether node k is such a convolution."""
    node = graph.nodes[k]
    if not isinstance(node.operation, Conv):
        return False
    return is_of_one_image(node.operation, graph.nodes[node.inputs[0]].shape, node.shape[2:])
