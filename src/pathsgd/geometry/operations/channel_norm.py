"""The adjoints of ``y = scale x + shift``, channel by channel, in one pass over the places."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pathsgd.geometry.devices import on_device

MANY_PLACES = 512
"""From so many on, a program has one channel; below, some."""


class NormAdjoints(NamedTuple):
    """What flows back to ``x``, and by channel to the scale and to the shift."""

    x: Tensor
    scale: Tensor
    shift: Tensor


def adjoin_norm(gradient: Tensor, x: Tensor, scale: Tensor) -> NormAdjoints:
    """The adjoints at ``x``; by Triton."""
    from pathsgd.geometry.operations.gpu.norm_kernels import norm_adjoint_kernel

    images, channels, *size = x.shape
    places = math.prod(size)
    gradient, x, scale = gradient.contiguous(), x.contiguous(), scale.contiguous()
    back, by_scale, by_shift = torch.empty_like(x), torch.empty_like(scale), torch.empty_like(scale)
    together, across = (1, 1024) if places >= MANY_PLACES else (4, 128)
    with on_device(x.device):
        norm_adjoint_kernel[(math.ceil(channels / together),)](
            gradient, x, scale, back, by_scale, by_shift, images, channels, places,
            CHANNELS=together, PLACES=across,
        )  # fmt: skip
    return NormAdjoints(back, by_scale, by_shift)
