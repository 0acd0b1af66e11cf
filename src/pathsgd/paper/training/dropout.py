"""Dropout with a random generator of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def drop_units(x: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Zeroes each entry with this probability, and divides the others by the probability to keep them."""
    kept = 1 - probability
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(kept, generator=generator)
    return _Masked.apply(x, mask, 1 / kept)  # type: ignore[no-untyped-call]


class _Masked(torch.autograd.Function):
    """``x mask factor``, which is its own derivative: one kernel forward and one backward.

    torch's dropout would do, but it takes the generator that everything else uses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.factor = factor
        return torch.ops.aten.native_dropout_backward(x, mask, factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, mask, ctx.factor), None, None
