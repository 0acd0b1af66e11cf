"""Convolutions of the powered network: sums by torch's kernels, maxima tap by tap."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

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


# p = inf: a maximum over taps and channels, where torch has no kernel


def _find_patches(operation: Conv, x: Tensor) -> Tensor:
    """What every output reads at each tap, by (sample, group, channel in it, tap, place): a convolution of
    every channel with kernels of a single 1."""
    kernel = operation.weight.shape[2:]
    taps = torch.eye(math.prod(kernel), dtype=x.dtype, device=x.device)
    taps = taps.reshape((1, -1, *kernel) if operation.transposed else (-1, 1, *kernel))
    patches = torch.convolution(
        x.flatten(0, 1)[:, None], taps, None, operation.stride, operation.padding, operation.dilation,
        operation.transposed, operation.output_padding, 1,
    )  # fmt: skip
    return patches.reshape(len(x), operation.groups, -1, *patches.shape[1:])


def _max_conv(operation: Conv, x: Tensor, edges: Tensor) -> Tensor:
    """A convolution whose sums are maxima."""
    patches = _find_patches(operation, x)
    places = patches.shape[4:]
    rows = by_output(operation, edges)
    rows = rows.reshape(operation.groups, -1, rows.shape[1], patches.shape[3], *(1 for _ in places))
    best = ((patches[:, :, None, :, t] * rows[:, :, :, t]).amax(3) for t in range(patches.shape[3]))
    return functools.reduce(torch.maximum, best).reshape(len(x), -1, *places)


def _max_weight_adjoint(operation: Conv, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    patches = _find_patches(operation, x)
    out = gradient.reshape(len(x), operation.groups, -1, 1, *gradient.shape[2:])
    batch_and_places = (0, *range(4, out.dim()))
    taps = range(patches.shape[3])
    best = torch.stack([(patches[:, :, None, :, t] * out).amax(batch_and_places) for t in taps], -1)
    return (best.transpose(1, 2) if operation.transposed else best).reshape(weight.shape)


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
