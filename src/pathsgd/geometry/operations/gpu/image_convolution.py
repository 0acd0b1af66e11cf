"""Convolutions of one image and their adjoints by kernels of our own: cudnn walks one image with few threads,
up to five times as long. Weights are read as they lie in memory, channels_last or not, and squared then."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pathsgd.geometry.devices import on_device
from pathsgd.geometry.operations.gpu.bordered_image import keep_border, spread, with_border
from pathsgd.geometry.operations.gpu.conv_kernels import ENTRIES, STEP, add_kernel, conv_kernel, weight_kernel
from pathsgd.graph.image_convolutions import is_pointwise
from pathsgd.graph.nodes import Conv, Shape

OUTPUTS, PLACES = 64, 16
"""The tile of an image that one program computes."""
WEIGHT_OUTPUTS, WEIGHT_TERMS = 32, 32
"""The same of a weight."""
PROGRAMS = 264
"""Two for each multiprocessor of an H200: a sum is split between programs up to so many."""
LEAST_SHARE, WEIGHT_LEAST_SHARE = 4, 32
"""Steps of a sum that a program has, at least."""


def convolve(operation: Conv, x: Tensor, weight: Tensor, size: Shape, *, square: bool) -> Tensor:
    """The convolution of one image, or its transpose, by the weights or, if it is not pointwise, their
    squares; ``size`` is that of the result."""
    if is_pointwise(operation):  # a product of matrices, which cuBLAS is made for
        matrix = weight.reshape(weight.shape[:2])
        y = (matrix.t() if operation.transposed else matrix) @ x.reshape(x.shape[1], -1)
        return y.reshape(1, -1, *size)
    weight = _make_dense(weight)
    (outputs, channels, *taps), (w_output, w_channel, *_) = weight.shape, weight.stride()
    reach = [d * (t - 1) for d, t in zip(operation.dilation, taps, strict=True)]
    if operation.transposed:
        outputs, channels, w_output, w_channel = channels, outputs, w_channel, w_output
        x = _spread_out(operation, x, size, reach)
        towards, stride = -1, tuple(1 for _ in taps)
    else:
        x = keep_border(x, operation.padding)
        towards, stride = 1, operation.stride
    terms, places = channels * math.prod(taps), math.prod(size)
    tiles = math.ceil(outputs / OUTPUTS) * math.ceil(places / PLACES)
    splits, share = _split(math.ceil(terms / STEP.value), tiles, LEAST_SHARE)
    parts = x.new_empty(splits, outputs, *size)
    with on_device(x.device):
        conv_kernel[(tiles, splits)](
            x, weight, parts, outputs, channels, *size, -towards * _dot(operation.padding, x),
            *_steps(stride, x), x.stride(1),
            *(towards * step for step in _steps(operation.dilation, x)),
            w_output, w_channel, _tap_stride(weight), share, *taps,
            IN_ORDER=not operation.transposed,
            CHANNELS_LAST=not operation.transposed and _is_channels_last(weight),
            SQUARE=square, EVEN=terms % STEP.value == 0, OUTPUTS=OUTPUTS, PLACES=PLACES,
            num_warps=2,
        )  # fmt: skip
    return parts if splits == 1 else _add(parts, torch.empty_like(parts[:1]))


def adjoin_weight(operation: Conv, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """``dF/dweight`` of a convolution of one image, laid out as the weight is."""
    outputs, channels, *taps = weight.shape
    if is_pointwise(operation):
        return (gradient.reshape(outputs, -1) @ x.reshape(channels, -1).t()).reshape(weight.shape)
    size = gradient.shape[2:]
    x = keep_border(x, operation.padding)
    gradient = gradient if gradient.stride(3) == 1 else gradient.contiguous()
    places, terms = math.prod(size), channels * math.prod(taps)
    tiles = math.ceil(outputs / WEIGHT_OUTPUTS) * math.ceil(terms / WEIGHT_TERMS)
    step = 16 if places <= 16 else STEP.value
    splits, share = _split(math.ceil(places / step), tiles, WEIGHT_LEAST_SHARE)
    result = torch.empty_like(_make_dense(weight), dtype=x.dtype)
    parts = result if splits == 1 else x.new_empty(splits, result.numel())
    with on_device(x.device):
        weight_kernel[(tiles, splits)](
            x, gradient, parts, outputs, channels, *size, -_dot(operation.padding, x),
            *_steps(operation.stride, x), x.stride(1), *_steps(operation.dilation, x),
            *gradient.stride()[1:3], share, *taps, CHANNELS_LAST=_is_channels_last(result),
            OUTPUTS=WEIGHT_OUTPUTS, TERMS=WEIGHT_TERMS, PLACES=step,
        )  # fmt: skip
    return result if splits == 1 else _add(parts, result)


def _spread_out(operation: Conv, x: Tensor, size: Shape, reach: list[int]) -> Tensor:
    """What a transposed convolution sees, its strides as zeros between places."""
    border = []
    for n, m, s, p, r in zip(size, x.shape[2:], operation.stride, operation.padding, reach, strict=True):
        before, after = r - p, n + p - ((m - 1) * s + 1)
        border.append(max(0, before, after))
    if set(operation.stride) == {1}:
        return with_border(x, tuple(border))
    return spread(x, tuple(border), operation.stride)


def _steps(by_axis: Shape, x: Tensor) -> tuple[int, int]:
    """How far apart in memory places of the image are, so many on each axis."""
    return by_axis[0] * x.stride(2), by_axis[1] * x.stride(3)


def _dot(by_axis: Shape, x: Tensor) -> int:
    return sum(_steps(by_axis, x))


def _split(steps: int, tiles: int, least: int) -> tuple[int, int]:
    """Between how many programs the sum of each tile is split, and how many steps each of them has: an image
    alone has few tiles."""
    splits = max(1, min(PROGRAMS // tiles, steps // least))
    share = math.ceil(steps / splits)
    return math.ceil(steps / share), share


def _add(parts: Tensor, total: Tensor) -> Tensor:
    """Sums over the first axis, into ``total``."""
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
