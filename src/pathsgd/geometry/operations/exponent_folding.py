"""Exponents of the inputs of a layer, folded into its weights before the power, so that nothing overflows and
nothing that matters in a sum underflows."""

from __future__ import annotations

import torch
from torch import Tensor

from pathsgd._torch import are_plain
from pathsgd.geometry.extended_float import DEAD, Arithmetic, exact_ldexp, power_of_two

ROW_RANGE = 90
"""fp32 holds the entries of a row to 2^-50 of the largest if that is over 2^-ROW_RANGE."""


def fold_exponents(arithmetic: Arithmetic, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """``|W[o, ...] 2^(tail - head_o)|^p`` and ``head``, chosen so that the largest entry of each row
    lies in [1/2, 1) before the power. ``tail`` broadcasts against ``weight``."""
    if not weight.numel():
        return weight, torch.full((weight.shape[0],), DEAD, dtype=torch.int32, device=weight.device)
    by_column = tail.shape[0] == 1 and not arithmetic.as_given  # which may be signed
    if not by_column or weight.device.type != "cpu" or not are_plain([weight, tail]):
        return fold_by_entry(arithmetic, weight, tail)
    others = tuple(range(2, weight.dim()))
    edges = weight.abs()
    columns = torch.frexp(edges.amax((0, *others), keepdim=True))
    frame = int(torch.where((columns.mantissa > 0) & (tail > DEAD // 2), columns.exponent + tail, DEAD).max())
    if frame <= DEAD // 2:
        return fold_by_entry(arithmetic, weight, tail)
    # In units of the largest entry, which is made 2^ROW_RANGE, and then every row in its own.
    edges = exact_ldexp(edges, tail + (ROW_RANGE - frame))
    rows = edges.amax((1, *others), keepdim=True)
    head = torch.frexp(rows).exponent
    edges = arithmetic.power(edges.mul_(power_of_two(-head, edges.dtype)))
    head = head.flatten() + (frame - ROW_RANGE)
    lost = (rows.flatten() < 2.0**-ROW_RANGE).nonzero().flatten()
    if len(lost):
        edges[lost], head[lost] = fold_by_entry(arithmetic, weight[lost], tail)
    return edges, head


def fold_by_entry(arithmetic: Arithmetic, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """The same, whatever the entries are."""
    largest = weight.detach().abs()
    if weight.dim() > 2:  # taps have one exponent: that of the largest
        largest = largest.amax(tuple(range(2, weight.dim())), keepdim=True)
    exponent = torch.frexp(largest).exponent + tail
    exponent = torch.where((largest == 0) | (tail <= DEAD // 2), DEAD, exponent)
    head = exponent.reshape(weight.shape[0], -1).amax(1)
    column = head.reshape(-1, *(1,) * (weight.dim() - 1))
    alive = exponent > DEAD // 2
    edges = arithmetic.power(exact_ldexp(weight, torch.where(alive, tail - column, 0)))
    return torch.where(alive, edges, 0), head
