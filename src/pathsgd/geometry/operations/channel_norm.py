"""``y = scale x + shift`` channel by channel in one pass over the places, and its adjoints in another."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pathsgd._torch import are_plain
from pathsgd.geometry.devices import on_device
from pathsgd.graph.nodes import Shape

MANY_PLACES = 512
"""From so many on, a program has one channel; below, some."""


def apply_norm(x: Tensor, scale: Tensor, shift: Tensor, border: Shape = ()) -> Tensor:
    """Of ``x`` with channels on axis 1. One image in fp32 gets zeros around it, if a border is wanted; by
    Triton."""
    if not border or len(x) != 1 or x.dtype != torch.float32 or not are_plain((x, scale, shift)):
        return torch.addcmul(shift, x, scale)
    from pathsgd.geometry.operations.gpu.bordered_image import new_bordered
    from pathsgd.geometry.operations.gpu.conv_kernels import ENTRIES
    from pathsgd.geometry.operations.gpu.norm_kernels import norm_kernel

    x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
    y, outer = new_bordered(x, tuple(x.shape[2:]), border)
    with on_device(x.device):
        norm_kernel[(math.ceil(outer.numel() / ENTRIES.value),)](
            x, scale, shift, outer, *x.shape[1:], *outer.shape[2:], *border
        )
    return y


class NormAdjoints(NamedTuple):
    """What flows back to ``x``, and by channel to the scale and to the shift."""

    x: Tensor
    scale: Tensor
    shift: Tensor


def adjoin_norm(gradient: Tensor, x: Tensor, scale: Tensor, border: Shape = ()) -> NormAdjoints:
    """The adjoints at ``x``; by Triton. What flows back to one image gets zeros around it, if a border is
    wanted."""
    from pathsgd.geometry.operations.gpu.bordered_image import new_bordered
    from pathsgd.geometry.operations.gpu.norm_kernels import norm_adjoint_kernel

    images, channels, *sizes = x.shape
    gradient, x, scale = gradient.contiguous(), x.contiguous(), scale.contiguous()
    by_scale, by_shift = torch.empty_like(scale), torch.empty_like(scale)
    if border and images == 1 and x.dtype == torch.float32:
        back, outer = new_bordered(x, tuple(sizes), border)
    else:
        border, sizes = (0, 0), [1, math.prod(sizes)]
        back = torch.empty_like(x)
        outer = back.reshape(images, channels, *sizes)
    together, across = (1, 1024) if math.prod(sizes) >= MANY_PLACES else (4, 128)
    with on_device(x.device):
        norm_adjoint_kernel[(math.ceil(channels / together),)](
            gradient, x, scale, outer, by_scale, by_shift, images, channels, *sizes, *outer.shape[2:],
            *border, CHANNELS=together, PLACES=across,
        )  # fmt: skip
    return NormAdjoints(back, by_scale, by_shift)
