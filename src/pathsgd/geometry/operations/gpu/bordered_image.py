"""Images with zeros around them, which convolutions see beyond the edges."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pathsgd.geometry.devices import on_device
from pathsgd.geometry.operations.gpu.conv_kernels import ENTRIES, spread_kernel
from pathsgd.graph.nodes import Shape


def new_bordered(like: Tensor, size: Shape, border: Shape) -> tuple[Tensor, Tensor]:
    """An image of this size inside of a larger one, and the larger one. Whoever fills it writes zeros into
    its border."""
    (height, width), (y, x) = size, border
    outer = torch.empty(*like.shape[:2], height + 2 * y, width + 2 * x, dtype=like.dtype, device=like.device)
    inner = outer[:, :, y : y + height, x : x + width]
    inner.border = border  # type: ignore[attr-defined]
    return inner, outer


def with_border(x: Tensor, border: Shape) -> Tensor:
    """The image with at least so many zeros around it: as it is, or a copy."""
    own = getattr(x, "border", (0, 0))
    return x if own[0] >= border[0] and own[1] >= border[1] else spread(x, border, (1, 1))


def keep_border(x: Tensor, border: Shape) -> Tensor:
    """The same, the copy kept with the image: the backward pass asks for it again."""
    copy = with_border(getattr(x, "bordered_copy", x), border)
    if copy is not x:
        x.bordered_copy = copy  # type: ignore[attr-defined]
    return copy


def spread(x: Tensor, border: Shape, stride: Shape) -> Tensor:
    """A copy with zeros around it, and between its places where a convolution has strides."""
    size = tuple((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True))
    inner, outer = new_bordered(x, size, border)
    with on_device(x.device):
        spread_kernel[(math.ceil(outer.numel() / ENTRIES.value),)](
            x, outer, *x.shape[1:], *outer.shape[2:], *x.stride()[1:], *border, *stride
        )
    return inner
