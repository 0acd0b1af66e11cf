"""Convolutions of the powered network: sums by torch's kernels, maxima tap by tap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pathsgd.geometry.scaled import Arithmetic, Scaled
from pathsgd.geometry.sharded import compute_on_shards, take_held_ends
from pathsgd.graph.nodes import Conv, Shape
from pathsgd.graph.unit_groups import by_output
from pathsgd.sharding import is_sharded, local_part

MOST_PLACES = 1 << 12


def convolve(arithmetic: Arithmetic, operation: Conv, x: Scaled, weight: Tensor) -> Scaled:
    """A convolution (or its transpose) in the powered network."""
    if is_sharded(weight):
        outputs, inputs = (1, 0) if operation.transposed else (0, 1)
        return compute_on_shards(
            lambda x, w: convolve(arithmetic, operation, x, w), arithmetic, x, weight, 1, outputs, inputs
        )
    weight, exponent = arithmetic.divide_by_middle(weight)
    edges = arithmetic.power_in_double(weight)
    if math.isinf(arithmetic.p):
        y = _max_conv(operation, x.mantissa, edges)
    elif x.mantissa.is_cuda and _is_small(operation, x.mantissa):
        y = _multiply_patches(operation, x.mantissa, edges)
    else:
        y = torch.convolution(
            x.mantissa, edges, None, operation.stride, operation.padding, operation.dilation,
            operation.transposed, operation.output_padding, operation.groups,
        )  # fmt: skip
    return arithmetic.center(Scaled(y, x.exponent + exponent))


def _is_small(operation: Conv, x: Tensor) -> bool:
    """Whether it is a convolution of few places, for which a GPU multiplies matrices up to ten times faster:
    cudnn's kernels in fp64 are slow there."""
    is_plain = not operation.transposed and operation.groups == 1 and len(operation.stride) == 2
    return is_plain and math.prod(_find_output_size(operation, tuple(x.shape[2:]))) <= MOST_PLACES


def _multiply_patches(operation: Conv, x: Tensor, edges: Tensor) -> Tensor:
    kernel = tuple(edges.shape[2:])
    patches = F.unfold(x, kernel, operation.dilation, operation.padding, operation.stride)
    size = _find_output_size(operation, tuple(x.shape[2:]))
    return (edges.flatten(1) @ patches).reshape(len(x), len(edges), *size)


def transpose_conv(operation: Conv, into: Shape, out: Shape) -> Conv:
    """The adjoint of a convolution: its transpose, and the other way round, with the same weight."""
    none = (0,) * len(operation.stride)
    flipped = replace(operation, transposed=not operation.transposed, output_padding=none)
    if operation.transposed:
        return flipped
    natural = _find_output_size(flipped, out[2:])
    return replace(flipped, output_padding=tuple(n - m for n, m in zip(into[2:], natural, strict=True)))


def adjoin_conv_weight(
    arithmetic: Arithmetic, operation: Conv, x: Scaled, gradient: Scaled, weight: Tensor
) -> Scaled:
    """``dF / d|W|^p``: for every weight, the path weight through all the places it is used at."""
    gradient, x = take_held_ends(weight, gradient, x, 1, outputs=1 if operation.transposed else 0)
    weight = local_part(weight)
    if math.isinf(arithmetic.p):
        value = _max_weight_adjoint(operation, x.mantissa, gradient.mantissa, weight)
    else:
        _, value, _ = torch.ops.aten.convolution_backward(
            gradient.mantissa, x.mantissa, weight.double(), None, operation.stride, operation.padding,
            operation.dilation, operation.transposed, operation.output_padding, operation.groups,
            (False, True, False),
        )  # fmt: skip
    return Scaled(value, x.exponent + gradient.exponent)


def _from_output(operation: Conv, rows: Tensor, shape: Shape) -> Tensor:
    """The inverse of :func:`by_output`."""
    if not operation.transposed:
        return rows
    g = operation.groups
    inputs, outputs, *taps = shape
    return rows.reshape(g, outputs, inputs // g, *taps).transpose(1, 2).reshape(shape)


# p = inf: a maximum over taps and channels, where torch has no kernel


def _taps(
    operation: Conv, small: Shape, large: Shape
) -> Iterator[tuple[Shape, tuple[slice, ...], tuple[slice, ...]]]:
    """For every tap, the places of the small grid and the places of the large grid it joins.

    The small grid is a convolution's output and the large one its input; transposed the other way.
    """
    kernel = operation.weight.shape[2:]
    for tap in itertools.product(*map(range, kernel)):
        here, there = [], []
        for k, t in enumerate(tap):
            stride, offset = operation.stride[k], t * operation.dilation[k] - operation.padding[k]
            first = max(-(offset // stride) if offset < 0 else 0, 0)
            last = min((large[k] - 1 - offset) // stride, small[k] - 1)
            here.append(slice(first, max(last + 1, first)))
            start = first * stride + offset
            stop = max(last * stride + offset + 1, start)
            there.append(slice(start, stop, stride))
        if all(s.stop > s.start for s in here):
            yield tap, tuple(here), tuple(there)


def at(x: Tensor, places: tuple[int, ...] | tuple[slice, ...]) -> Tensor:
    """A view of ``x`` at these places of its last axes."""
    index: tuple[Any, ...] = (Ellipsis, *places)
    return x[index]


def _max_conv(operation: Conv, x: Tensor, edges: Tensor) -> Tensor:
    """A convolution whose sums are maxima."""
    rows = by_output(operation, edges)
    g = operation.groups
    spatial_in = tuple(x.shape[2:])
    spatial_out = _find_output_size(operation, spatial_in)
    y = x.new_zeros(x.shape[0], rows.shape[0], *spatial_out)
    grouped = x.reshape(x.shape[0], g, 1, -1, *spatial_in)
    small, large = (spatial_in, spatial_out) if operation.transposed else (spatial_out, spatial_in)
    for tap, on_small, on_large in _taps(operation, small, large):
        source, target = (on_small, on_large) if operation.transposed else (on_large, on_small)
        weights = at(rows, tap).reshape(1, g, -1, rows.shape[1], *(1,) * len(spatial_in))
        best = (at(grouped, source) * weights).amax(3)
        part = at(y, target)
        part.copy_(torch.maximum(part.clone(), best.reshape(part.shape)))
    return y


def _find_output_size(operation: Conv, size: Shape) -> Shape:
    kernel = operation.weight.shape[2:]
    sizes = []
    for k, n in enumerate(size):
        reach = operation.dilation[k] * (kernel[k] - 1) + 1
        if operation.transposed:
            out = (n - 1) * operation.stride[k] - 2 * operation.padding[k] + reach
            sizes.append(out + operation.output_padding[k])
        else:
            sizes.append((n + 2 * operation.padding[k] - reach) // operation.stride[k] + 1)
    return tuple(sizes)


def _max_weight_adjoint(operation: Conv, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    g = operation.groups
    spatial_in, spatial_out = tuple(x.shape[2:]), tuple(gradient.shape[2:])
    rows = by_output(operation, weight)
    best = x.new_zeros(rows.shape)
    into = x.reshape(x.shape[0], g, 1, -1, *spatial_in)
    out = gradient.reshape(x.shape[0], g, -1, 1, *spatial_out)
    small, large = (spatial_in, spatial_out) if operation.transposed else (spatial_out, spatial_in)
    for tap, on_small, on_large in _taps(operation, small, large):
        source, target = (on_small, on_large) if operation.transposed else (on_large, on_small)
        pairs = at(into, source) * at(out, target)
        reduced = pairs.amax(dim=(0, *range(4, pairs.dim())))
        at(best, tap).copy_(reduced.reshape(rows.shape[:2]))
    return _from_output(operation, best, tuple(weight.shape))
