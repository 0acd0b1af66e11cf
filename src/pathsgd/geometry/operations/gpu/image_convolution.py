"""Convolutions of one image and their adjoints as matrix products: cudnn walks one image with few threads, up
to five times as long. Weights are read as they lie in memory, channels_last or not."""

from __future__ import annotations

import math

from torch import Tensor

from pathsgd.geometry.devices import on_device
from pathsgd.geometry.operations.gpu.patch_kernels import ENTRIES, fold_kernel, gather_kernel
from pathsgd.graph.nodes import Conv, Shape


def convolve(operation: Conv, x: Tensor, weight: Tensor, size: Shape) -> Tensor:
    """The convolution of one image, or its transpose; ``size`` is that of the result."""
    matrix = _to_matrix(weight)
    if operation.transposed:
        patches = matrix.t() @ x.reshape(x.shape[1], -1)
        return _fold(operation, patches, weight, tuple(x.shape[2:]), size)
    return (matrix @ _gather(operation, x, weight, size)).reshape(1, len(weight), *size)


def adjoin_weight(operation: Conv, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """``dF/dweight`` of a convolution of one image, laid out as the weight is."""
    by_place = gradient.reshape(len(weight), -1)
    matrix = by_place @ _gather(operation, x, weight, tuple(gradient.shape[2:])).t()
    outputs, inputs, *taps = weight.shape
    if _is_channels_last(weight):
        return matrix.reshape(outputs, *taps, inputs).permute(0, 3, 1, 2)
    return matrix.reshape(weight.shape)


def _is_channels_last(weight: Tensor) -> bool:
    return weight.stride(1) == 1 and math.prod(weight.shape[2:]) > 1


def _to_matrix(weight: Tensor) -> Tensor:
    """A row for each entry of axis 0; its columns in the order in which they lie in memory."""
    return (weight.permute(0, 2, 3, 1) if _is_channels_last(weight) else weight).reshape(len(weight), -1)


def _is_pointwise(operation: Conv) -> bool:
    once = set(operation.weight.shape[2:]) | set(operation.stride) == {1}
    return once and not any(operation.padding) and not any(operation.output_padding)


def _gather(operation: Conv, x: Tensor, weight: Tensor, size: Shape) -> Tensor:
    """What the weights of a channel see of one image at each place: ``(inputs * taps, places)``."""
    if _is_pointwise(operation):
        return x.reshape(x.shape[1], -1)
    taps, places = tuple(weight.shape[2:]), math.prod(size)
    patches = x.new_empty(x.shape[1] * math.prod(taps), places)
    with on_device(x.device):
        gather_kernel[(-(-patches.numel() // ENTRIES.value),)](
            x, patches, *x.shape[1:], *size, *taps, *x.stride()[1:],
            *operation.stride, *operation.padding, *operation.dilation, _is_channels_last(weight),
        )  # fmt: skip
    return patches


def _fold(operation: Conv, patches: Tensor, weight: Tensor, small: Shape, size: Shape) -> Tensor:
    """The adjoint of :func:`_gather`."""
    channels, *taps = weight.shape[1:]
    if _is_pointwise(operation):
        return patches.reshape(1, channels, *size)
    x = patches.new_empty(1, channels, *size)
    with on_device(x.device):
        fold_kernel[(-(-x.numel() // ENTRIES.value),)](
            patches, x, channels, *size, *small, *taps,
            *operation.stride, *operation.padding, *operation.dilation, _is_channels_last(weight),
        )  # fmt: skip
    return x
