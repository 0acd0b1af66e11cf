"""Convolutions of one image and their adjoints by kernels of our own: cudnn walks one image with few threads,
up to five times as long. Weights are read as they lie in memory, channels_last or not, and squared then."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from pathsgd.geometry.cuda_graph import find_capture
from pathsgd.geometry.devices import on_device
from pathsgd.geometry.operations.gpu.bordered_image import spread, with_border
from pathsgd.geometry.operations.gpu.conv_kernels import STEP, conv_kernel, weight_kernel
from pathsgd.graph.nodes import Conv, Shape

OUTPUTS, PLACES, TERMS = 64, 16, 32
"""Of a program: the rows of its tile, and the columns, of images and of weights."""
PROGRAMS = 128
"""That a GPU is given to do, if sums are long enough to be split."""
LEAST_SHARE = 8
"""Steps of a sum that a program has, at least."""
OPTIONS = {"num_warps": 2, "num_stages": 3}


def convolve(operation: Conv, x: Tensor, weight: Tensor, size: Shape, *, square: bool) -> Tensor:
    """The convolution of one image, or its transpose, by the weights or their squares; ``size`` is that of
    the result."""
    weight = _lay_out(weight)
    (outputs, channels, *taps), (w_output, w_channel, *_) = weight.shape, weight.stride()
    reach = [d * (t - 1) for d, t in zip(operation.dilation, taps, strict=True)]
    if operation.transposed:
        outputs, channels, w_output, w_channel = channels, outputs, w_channel, w_output
        x = _spread_out(operation, x, size, reach)
        towards, stride = -1, tuple(1 for _ in taps)
    else:
        x = with_border(x, operation.padding)
        towards, stride = 1, operation.stride
    terms, across = channels * math.prod(taps), math.ceil(math.prod(size) / PLACES)
    tiles, splits, share = _plan(outputs, across, math.ceil(terms / STEP.value))
    result = x.new_empty(1, outputs, *size)
    parts, counters = _keep(result, splits)
    with on_device(x.device):
        conv_kernel[(tiles, splits)](
            x, weight, result, parts, counters, outputs, channels, *size,
            -towards * _dot(operation.padding, x), *_steps(stride, x), x.stride(1),
            *(towards * step for step in _steps(operation.dilation, x)),
            w_output, w_channel, weight.stride(3), result.numel(), share, splits, *taps,
            IN_ORDER=not operation.transposed,
            CHANNELS_LAST=not operation.transposed and _is_channels_last(weight),
            SQUARE=square, EVEN=terms % STEP.value == 0, OUTPUTS=OUTPUTS, PLACES=PLACES, **OPTIONS,
        )  # fmt: skip
    return result


def adjoin_weight(operation: Conv, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """``dF/dweight`` of a convolution of one image, laid out as the weight is."""
    outputs, channels, *taps = weight.shape
    size = gradient.shape[2:]
    x = with_border(x, operation.padding)
    gradient = gradient if gradient.stride(3) == 1 else gradient.contiguous()
    across = math.ceil(channels * math.prod(taps) / TERMS)
    tiles, splits, share = _plan(outputs, across, math.ceil(math.prod(size) / STEP.value))
    result = torch.empty_like(_lay_out(weight), dtype=x.dtype)
    parts, counters = _keep(result, splits)
    with on_device(x.device):
        weight_kernel[(tiles, splits)](
            x, gradient, result, parts, counters, outputs, channels, *size, -_dot(operation.padding, x),
            *_steps(operation.stride, x), x.stride(1), *_steps(operation.dilation, x),
            *gradient.stride()[1:3], result.stride(0), result.numel(), share, splits, *taps,
            CHANNELS_LAST=_is_channels_last(result), OUTPUTS=OUTPUTS, TERMS=TERMS, **OPTIONS,
        )  # fmt: skip
    return result


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
    """In entries of the image."""
    return by_axis[0] * x.stride(2), by_axis[1] * x.stride(3)


def _dot(by_axis: Shape, x: Tensor) -> int:
    return sum(_steps(by_axis, x))


def _plan(outputs: int, across: int, steps: int) -> tuple[int, int, int]:
    """How many tiles there are, between how many programs the sum of each is split, and how many steps each
    of these has: an image alone has few tiles."""
    tiles = math.ceil(outputs / OUTPUTS) * across
    splits = max(1, min(PROGRAMS // tiles, steps // LEAST_SHARE))
    share = math.ceil(steps / splits)
    return tiles, math.ceil(steps / share), share


def _keep(result: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Where programs that share a sum put their parts, and where they count how many are done."""
    if splits == 1:
        return result, result
    counters = _counters(result.device)
    result.counters = counters  # type: ignore[attr-defined]
    return result.new_empty(splits, result.numel()), counters


_zeros: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()
"""By stream and capture. What kernels count in is zero again when they end, so that those of one stream can
share it: as long as a result of theirs lives."""


def _counters(device: torch.device) -> Tensor:
    if device.type != "cuda":  # Triton's interpreter
        return torch.zeros(PROGRAMS, dtype=torch.int32)
    stream = torch.cuda.current_stream(device)
    key = stream.cuda_stream, find_capture(stream)
    counters = _zeros.get(key)
    if counters is None or counters.device != device:
        counters = _zeros[key] = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
    return counters


def _lay_out(weight: Tensor) -> Tensor:
    """As it is, if channels and taps of an output lie together in one of two orders."""
    return weight if weight.is_contiguous() or _is_channels_last(weight) else weight.contiguous()


def _is_channels_last(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
