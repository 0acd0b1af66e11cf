"""Convolutions of one image and their adjoints as products of matrices: cudnn walks one image with few
threads, up to five times as long. Weights are read as they lie in memory, channels_last or not, and squared
then."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pathsgd.geometry.devices import on_device
from pathsgd.geometry.operations.gpu.conv_kernels import (
    ENTRIES,
    STEP,
    add_kernel,
    gather_kernel,
    product_kernel,
)
from pathsgd.graph.image_convolutions import is_pointwise
from pathsgd.graph.nodes import Conv, Shape

ROWS, FEW_COLUMNS, MANY_COLUMNS = 64, 16, 64
"""Of the tile that one program computes: for tiny images, and for others."""
LINES, ACROSS = 16, 64
"""The same of what is gathered."""
PROGRAMS = 132
"""One for each multiprocessor of an H200: a sum is split between programs up to so many."""
LEAST_SHARE = 4
"""Steps of a sum that a program has, at least."""


def convolve(operation: Conv, x: Tensor, weight: Tensor, size: Shape, *, square: bool) -> Tensor:
    """The convolution of one image, or its transpose, by the weights or their squares; ``size`` is that of
    the result."""
    weight = _make_dense(weight)
    (outputs, channels, *taps), (w_output, w_channel, *_) = weight.shape, weight.stride()
    if operation.transposed:
        outputs, channels, w_output, w_channel = channels, outputs, w_channel, w_output
    channels_last = not operation.transposed and _is_channels_last(weight)
    seen = _gather(operation, x, size, channels_last, by_place=True)
    terms, count = channels * math.prod(taps), math.prod(taps)
    strides = w_output, w_channel, _tap_stride(weight)
    y = _multiply(weight, (outputs, terms), strides, seen, count, not operation.transposed, square)
    return y.reshape(1, outputs, *size)


def adjoin_weight(operation: Conv, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """``dF/dweight`` of a convolution of one image, laid out as the weight is."""
    (outputs, channels, *taps), (_, _, *size) = weight.shape, gradient.shape
    gradient, channels_last = gradient.reshape(outputs, -1), _is_channels_last(weight)
    if CUBLAS and is_pointwise(operation):
        return (gradient @ x.reshape(channels, -1).t()).reshape(weight.shape)
    seen = _gather(operation, x, tuple(size), channels_last, by_place=False)
    strides = gradient.stride(0), 0, 0
    result = _multiply(gradient, tuple(gradient.shape), strides, seen, 1, True, False)
    if channels_last:
        return result.reshape(outputs, *taps, channels).permute(0, 3, 1, 2)
    return result.reshape(weight.shape)


CUBLAS = False


def _gather(operation: Conv, x: Tensor, size: Shape, channels_last: bool, by_place: bool) -> Tensor:
    """What each tap sees at each place, as ``gather_kernel`` has it: high and low."""
    if operation.transposed:
        first, place, gap = operation.padding, (1, 1), operation.stride
        tap = tuple(-d for d in operation.dilation)
    else:
        first, place, gap = tuple(-p for p in operation.padding), operation.stride, (1, 1)
        tap = operation.dilation
    taps = operation.weight.shape[2:]
    terms, places = x.shape[1] * math.prod(taps), math.prod(size)
    lines, across = (places, terms) if by_place else (terms, places)
    found = x.new_empty(2, lines, math.ceil(across / STEP.value) * STEP.value)
    with on_device(x.device):
        gather_kernel[(math.ceil(lines / LINES), math.ceil(found.shape[2] / ACROSS))](
            x, *found, *x.shape[1:], places, size[1], *found.shape[1:], *x.stride()[1:], *first, *place,
            *tap, *gap, *taps, CHANNELS_LAST=channels_last, BY_PLACE=by_place, GAPS=gap != (1, 1),
            LINES=LINES, ACROSS=ACROSS,
        )  # fmt: skip
    return found


def _multiply(
    matrix: Tensor, shape: Shape, strides: Shape, seen: Tensor, taps: int, in_order: bool, square: bool
) -> Tensor:
    """The matrix, of this shape and these strides of rows, channels and taps, or its squares, times
    ``seen.sum(0).T``."""
    (rows, terms), (_, columns, filled) = shape, seen.shape
    tile = FEW_COLUMNS if columns <= FEW_COLUMNS else MANY_COLUMNS
    tiles = math.ceil(rows / ROWS) * math.ceil(columns / tile)
    splits, share = _split(math.ceil(terms / STEP.value), tiles)
    parts = seen.new_empty(splits, rows, columns)
    with on_device(seen.device):
        product_kernel[(tiles, splits)](
            *seen, matrix, parts, rows, terms, columns, filled, *strides, share, taps, IN_ORDER=in_order,
            SQUARE=square, EVEN=terms % STEP.value == 0, ROWS=ROWS, COLUMNS=tile,
        )  # fmt: skip
    return parts[0] if splits == 1 else _add(parts)


def _split(steps: int, tiles: int) -> tuple[int, int]:
    """Between how many programs the sum of each tile is split, and how many steps each of them has: an image
    alone has few tiles."""
    splits = max(1, min(PROGRAMS // tiles, steps // LEAST_SHARE))
    share = math.ceil(steps / splits)
    return math.ceil(steps / share), share


def _add(parts: Tensor) -> Tensor:
    """Sums over the first axis."""
    total = torch.empty_like(parts[0])
    with on_device(parts.device):
        add_kernel[(math.ceil(total.numel() / ENTRIES.value),)](parts, total, total.numel(), len(parts))
    return total


def _make_dense(weight: Tensor) -> Tensor:
    """A copy unless channels and taps of an output lie together, in one of two orders."""
    return weight if weight.is_contiguous() or _is_channels_last(weight) else weight.contiguous()


def _tap_stride(weight: Tensor) -> int:
    """From one tap to the next: torch lets an axis of size one have any stride."""
    return weight.shape[1] if _is_channels_last(weight) else 1


def _is_channels_last(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
