"""The effect of one operation on path weights, and its adjoint.

Every operation is linear in its input, so its adjoint is again an operation: the backward pass of
Algorithm 1 is the forward pass of these.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from pathsgd.geometry.operations.contraction import contract
from pathsgd.geometry.operations.convolution import convolve, transpose_conv
from pathsgd.geometry.operations.windows import window_index, window_powers
from pathsgd.geometry.scaled import Arithmetic, Scaled, apply_view
from pathsgd.graph import nodes
from pathsgd.graph.nodes import AxisMap, Conv, Embed, Expand, Operation, Permute, Reshape, Shape, Slice


def apply(
    arithmetic: Arithmetic,
    operation: Operation,
    inputs: list[Scaled],
    weight: Tensor | None,
    shape: Shape,
    device: torch.device,
) -> Scaled:
    """The value of one node from the values of its inputs."""
    match operation:
        case nodes.Begin():
            return arithmetic.ones(shape, device)
        case nodes.Source():
            assert weight is not None
            return arithmetic.edges(weight, shape)
        case nodes.Linear():
            assert weight is not None
            return contract(arithmetic, inputs[0], weight)
        case Conv():
            assert weight is not None
            return convolve(arithmetic, operation, inputs[0], weight)
        case nodes.Multiply():
            assert weight is not None
            return arithmetic.multiply(inputs[0], arithmetic.edges(weight, shape))
        case nodes.Add():
            return arithmetic.add(inputs)
        case nodes.Square():
            return arithmetic.multiply(inputs[0], inputs[0])
        case AxisMap():
            return axis_map(arithmetic, operation, inputs[0])
        case nodes.Reduce():
            return arithmetic.reduce(inputs[0], operation.dims)
        case nodes.Cat():
            return arithmetic.cat(inputs, operation.dim)
        case Slice():
            # Units that are left out may have set the exponent of those that stay.
            return arithmetic.center(apply_view(operation, inputs[0]))
        case _:
            return apply_view(operation, inputs[0])


def adjoint(
    arithmetic: Arithmetic,
    operation: Operation,
    gradient: Scaled,
    weight: Tensor | None,
    shapes: list[Shape],
    squared: Scaled | None = None,
) -> list[Scaled]:
    """The path weight that flows back to each input of a node, given their shapes (and the value
    that is squared, the one operation that is not linear)."""
    match operation:
        case nodes.Begin() | nodes.Source():
            return []
        case nodes.Linear():
            assert weight is not None
            return [contract(arithmetic, gradient, weight.t())]
        case Conv():
            assert weight is not None
            out = tuple(gradient.mantissa.shape)
            flow = convolve(arithmetic, transpose_conv(operation, shapes[0], out), gradient, weight)
            for d, (n, m) in enumerate(zip(shapes[0], flow.mantissa.shape, strict=True)):
                if n < m:  # a transposed convolution whose output padding is as long as a stride
                    flow = apply_view(Slice(d, 0, n), flow)
            return [flow]
        case nodes.Multiply():
            assert weight is not None
            return [arithmetic.multiply(gradient, arithmetic.edges(weight, shapes[0]))]
        case nodes.Add():
            return [gradient] * len(shapes)
        case nodes.Square():
            # d(x^2) = 2 x dx; the best pair of paths (p = inf) has no factor 2.
            factor = 1 if math.isinf(arithmetic.p) else 2
            assert squared is not None
            pair = arithmetic.multiply(gradient, squared)
            return [Scaled(pair.mantissa * factor, pair.exponent)]
        case AxisMap():
            return [axis_map(arithmetic, replace(operation, adjoint=True), gradient)]
        case Expand():
            dims = [d for d, n in enumerate(shapes[0]) if n != operation.shape[d]]
            return [arithmetic.reduce(gradient, dims)]
        case nodes.Reduce():
            return [apply_view(Expand(shapes[0]), gradient)]
        case nodes.Cat():
            sizes = [shape[operation.dim] for shape in shapes]
            return [
                arithmetic.center(apply_view(Slice(operation.dim, sum(sizes[:k]), size), gradient))
                for k, size in enumerate(sizes)
            ]
        case Reshape():
            return [apply_view(Reshape(shapes[0]), gradient)]
        case Permute():
            inverse = sorted(range(len(operation.dims)), key=operation.dims.__getitem__)
            return [apply_view(Permute(tuple(inverse)), gradient)]
        case Slice():
            back = Embed(operation.dim, operation.start, shapes[0][operation.dim], operation.step)
            return [apply_view(back, gradient)]
        case Embed():
            raise AssertionError("an adjoint in a traced graph")


def axis_map(arithmetic: Arithmetic, operation: AxisMap, x: Scaled) -> Scaled:
    """Fixed edges along one axis: pooling, padding, gathering, resizing."""
    if operation.copies:
        index = window_index(operation.window, x.mantissa.device)
        return arithmetic.center(Scaled(x.mantissa.index_select(operation.dim, index), x.exponent))
    edges = window_powers(operation.window, operation.adjoint, arithmetic, x.mantissa.device)
    moved = x.mantissa.movedim(operation.dim, -1)
    if math.isinf(arithmetic.p):
        mapped = torch.stack([(moved * edge).amax(-1) for edge in edges], -1)
    else:
        mapped = moved @ edges.t()
    return arithmetic.center(Scaled(mapped.movedim(-1, operation.dim), x.exponent))
