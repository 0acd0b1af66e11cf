"""Convolutions of one image and their adjoints as products of matrices: cudnn walks one image with few
threads, up to five times as long. Weights are read as they lie in memory, channels_last or not, and squared
then."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from pathsgd.geometry.devices import on_device
from pathsgd.geometry.operations.gpu.conv_kernels import STEP, add_kernel, gather_kernel, product_kernel
from pathsgd.graph.nodes import Conv, Shape

ROWS, FEW_COLUMNS, MANY_COLUMNS = 64, 16, 64
"""Of the tile of a product that one program computes: for tiny images, and for others. Tensor cores of a
Hopper multiply 64 rows."""
LINES, ACROSS = 8, 64
"""The tile of what is gathered."""
ENTRIES = 512
"""Of a program that adds."""
PROGRAMS = 132
"""One for each multiprocessor of an H200: a sum is split between programs up to so many."""
LEAST_SHARE = 4
"""Steps of a sum that a program has, at least."""


def convolve(operation: Conv, x: Tensor, weight: Tensor, size: Shape, *, square: bool) -> Tensor:
    """The convolution of one image, or its transpose, by the weights or their squares; ``size`` is that of
    the result."""
    if operation.transposed and operation.stride != (1, 1) and _sees_one_place(operation):
        return _put_apart(operation, x, weight, size, square=square)
    weight = _make_dense(weight)
    (outputs, inputs, *taps), channels_last = weight.shape, _is_channels_last(weight)
    if operation.transposed:
        seen = _gather(operation, x, size, False, by_place=True)
        strides = weight.stride(1), weight.stride(0), inputs if channels_last else 1
        y = _multiply(weight, inputs, outputs * math.prod(taps), seen, strides, math.prod(taps), square)
    else:  # terms are in the order in which they lie in memory
        seen = _gather(operation, x, size, channels_last, by_place=True)
        y = _multiply(weight, outputs, inputs * math.prod(taps), seen, (weight.stride(0), 1, 0), 1, square)
    return y.reshape(1, -1, *size)


def adjoin_weight(operation: Conv, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """``dF/dweight`` of a convolution of one image, laid out as the weight is."""
    outputs, channels, *taps = weight.shape
    channels_last = _is_channels_last(weight)
    seen = _gather(operation, x, tuple(gradient.shape[2:]), channels_last, by_place=False)
    gradient = gradient.reshape(outputs, -1).contiguous()  # which may be one number, expanded
    places = gradient.shape[1]
    found = _multiply(gradient, outputs, places, seen, (places, 1, 0), 1, square=False)
    if channels_last:
        return found.reshape(outputs, *taps, channels).permute(0, 3, 1, 2)
    return found.reshape(weight.shape)


def _put_apart(operation: Conv, x: Tensor, weight: Tensor, size: Shape, *, square: bool) -> Tensor:
    """The transpose of a convolution by one tap, with strides: most of it is zero."""
    (rows, columns), (down, right) = x.shape[2:], operation.stride
    y = convolve(replace(operation, stride=(1, 1)), x, weight, (rows, columns), square=square)
    whole = y.new_zeros(*y.shape[:2], *size)
    whole[:, :, : rows * down : down, : columns * right : right] = y
    return whole


def _gather(operation: Conv, x: Tensor, size: Shape, channels_last: bool, by_place: bool) -> Tensor:
    """What each tap sees at each place, as ``gather_kernel`` has it: high and low."""
    once: Shape = (1, 1)
    if operation.transposed:
        first, place, gap = operation.padding, once, operation.stride
        tap = tuple(-d for d in operation.dilation)
    else:
        first, place, gap = tuple(-p for p in operation.padding), operation.stride, once
        tap = operation.dilation
    taps = operation.weight.shape[2:]
    terms, places = x.shape[1] * math.prod(taps), math.prod(size)
    lines, across = (places, terms) if by_place else (terms, places)
    found = x.new_empty(2, lines, math.ceil(across / STEP.value) * STEP.value)
    with on_device(x.device):
        gather_kernel[(math.ceil(lines / LINES), math.ceil(across / ACROSS))](
            x, *found, *x.shape[1:], places, size[1], *found.shape[1:], *x.stride()[1:], *first, *place,
            *tap, *gap, *taps, CHANNELS_LAST=channels_last, BY_PLACE=by_place, GAPS=gap != once,
            LINES=LINES, ACROSS=ACROSS,
        )  # fmt: skip
    return found


def _multiply(
    matrix: Tensor, rows: int, terms: int, seen: Tensor, strides: Shape, taps: int, square: bool
) -> Tensor:
    """The matrix (rows, terms), or its squares, times what is seen, as ``product_kernel`` has it; strides are
    those of rows, channels and taps."""
    _, columns, filled = seen.shape
    tile = FEW_COLUMNS if columns <= FEW_COLUMNS else MANY_COLUMNS
    tiles = math.ceil(rows / ROWS) * math.ceil(columns / tile)
    splits, share = _split(math.ceil(terms / STEP.value), tiles)
    parts = seen.new_empty(splits, rows, columns)
    with on_device(seen.device):
        product_kernel[(tiles, splits)](
            *seen, matrix, parts, rows, terms, columns, filled, *strides, share, taps, SQUARE=square,
            EVEN=terms % STEP.value == 0, ROWS=ROWS, COLUMNS=tile,
        )  # fmt: skip
        if splits == 1:
            return parts[0]
        total = torch.empty_like(parts[0])
        add_kernel[(math.ceil(total.numel() / ENTRIES),)](parts, total, total.numel(), splits, ENTRIES)
        return total


def _split(steps: int, tiles: int) -> tuple[int, int]:
    """Between how many programs the sum of each tile is split, and how many steps each of them has: an image
    alone has few tiles."""
    splits = max(1, min(PROGRAMS // tiles, steps // LEAST_SHARE))
    share = math.ceil(steps / splits)
    return math.ceil(steps / share), share


def _sees_one_place(operation: Conv) -> bool:
    return math.prod(operation.weight.shape[2:]) == 1 and not any(operation.padding)


def _make_dense(weight: Tensor) -> Tensor:
    """A copy unless channels and taps of an output lie together, in one of two orders."""
    return weight if weight.is_contiguous() or _is_channels_last(weight) else weight.contiguous()


def _is_channels_last(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
