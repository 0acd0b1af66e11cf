"""Views of path weights: units change places, numbers stay as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pathsgd.geometry.extended_float import DEAD, ExtendedFloat
from pathsgd.graph.nodes import Embed, Expand, Operation, Permute, Reshape, Slice
from pathsgd.graph.views import embed, view_tensor


def apply_view(operation: Operation, x: ExtendedFloat) -> ExtendedFloat:
    """One view, of mantissas and exponents alike."""
    exponent = None if x.exponent is None else _view_exponent(operation, x.mantissa, x.exponent)
    return ExtendedFloat(view_tensor(operation, x.mantissa), exponent)


def _view_exponent(operation: Operation, mantissa: Tensor, exponent: Tensor) -> Tensor:
    """Exponents move as their units do; an axis on which they are shared stays shared."""
    match operation:
        case Reshape(shape):
            if exponent.numel() == 1:
                return exponent.reshape((1,) * len(shape))
            return exponent.expand(mantissa.shape).reshape(shape)
        case Permute(dims):
            return exponent.permute(dims)
        case Expand():
            return exponent
        case Slice(dim):
            return exponent if exponent.shape[dim] == 1 else view_tensor(operation, exponent)
        case Embed(dim, start, size, step):
            if exponent.shape[dim] == 1:
                return exponent
            return embed(exponent, dim, start, size, step, DEAD)
        case _:
            raise AssertionError(f"{operation} is no view")


def cat(values: Sequence[ExtendedFloat], dim: int) -> ExtendedFloat:
    """Values joined along one axis."""
    mantissa = torch.cat([v.mantissa for v in values], dim)
    if any(v.exponent is None for v in values):
        return ExtendedFloat(mantissa)
    exponents = [v.exponent for v in values if v.exponent is not None]
    ndim = mantissa.dim()
    common = [max(e.shape[d] for e in exponents) for d in range(ndim)]
    widened = []
    for value, e in zip(values, exponents, strict=True):
        common[dim] = value.mantissa.shape[dim]
        widened.append(e.expand(common))
    return ExtendedFloat(mantissa, torch.cat(widened, dim))


def stack(values: Sequence[ExtendedFloat]) -> ExtendedFloat:
    """Values of one shape along a new first axis."""
    return cat([apply_view(Reshape((1, *value.mantissa.shape)), value) for value in values], 0)
