"""``y[o] = sum_i |W[o, i]|^p x[i]``: the step of Algorithm 1, in cache-sized blocks.

|W|^p is never stored whole: a block of W is read once, and its powers are used while they are in the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pathsgd.geometry.scaled import Arithmetic, Scaled
from pathsgd.geometry.sharded import compute_on_shards
from pathsgd.sharding import is_sharded

BLOCK = 1 << 18
"""Entries of W in one block: few enough to stay in the cache, many enough that calls of torch cost little."""

BLOCK_ON_DEVICE = 1 << 25
"""Elsewhere a block only bounds the memory: few large kernels are faster than many small ones."""


def contract(arithmetic: Arithmetic, x: Scaled, weight: Tensor) -> Scaled:
    """A linear layer in the powered network; ``x`` has its units on the last axis."""
    if is_sharded(weight):
        return compute_on_shards(lambda x, w: contract(arithmetic, x, w), arithmetic, x, weight, -1, 0, 1)
    weight, exponent = arithmetic.divide_by_middle(weight)
    lead = x.mantissa.shape[:-1]
    rows = x.mantissa.reshape(math.prod(lead), x.mantissa.shape[-1])
    if math.isinf(arithmetic.p):
        y = _max_product(rows, arithmetic.power(weight.double()))
    elif torch.is_grad_enabled() and (weight.requires_grad or rows.requires_grad):
        y = rows @ arithmetic.power(weight.double()).t()
    else:
        y = _contract_blocks(arithmetic, rows, weight)
    return arithmetic.center(Scaled(y.reshape(*lead, weight.shape[0]), x.exponent + exponent))


def adjoin_linear_weight(arithmetic: Arithmetic, x: Scaled, gradient: Scaled) -> Scaled:
    """``dF / d|W|^p``: the sum over positions of gamma_out(o) gamma_in(i)."""
    into = x.mantissa.reshape(-1, x.mantissa.shape[-1])
    out = gradient.mantissa.reshape(-1, gradient.mantissa.shape[-1])
    if math.isinf(arithmetic.p):
        value = into.new_zeros(out.shape[1], into.shape[1])
        for row, column in zip(out, into, strict=True):
            value = torch.maximum(value, torch.outer(row, column))
    else:
        value = out.t() @ into
    return Scaled(value, x.exponent + gradient.exponent)


def add_outer_products(arithmetic: Arithmetic, uses: Sequence[tuple[Scaled, Scaled]]) -> Scaled:
    """The sum of ``gamma_out(o) gamma_in(i)`` over the uses of a matrix, given as pairs of vectors."""
    return arithmetic.add([adjoin_linear_weight(arithmetic, into, out) for out, into in uses])


def _contract_blocks(arithmetic: Arithmetic, x: Tensor, weight: Tensor) -> Tensor:
    """``x @ (|W|^p)^T``, block by block along the axis in which W lies contiguous in memory."""
    outputs, inputs = weight.shape
    block = BLOCK if weight.device.type == "cpu" else BLOCK_ON_DEVICE
    if weight.stride(0) >= weight.stride(1):
        rows = max(block // max(inputs, 1), 1)
        parts = [x @ arithmetic.power(part.double()).t() for part in weight.split(rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    step = max(block // max(outputs, 1), 1)
    pairs = zip(x.split(step, 1), weight.t().split(step), strict=True)
    return functools.reduce(torch.add, (columns @ arithmetic.power(part.double()) for columns, part in pairs))


def _max_product(x: Tensor, edges: Tensor) -> Tensor:
    """``max_i edges[o, i] x[n, i]``."""
    if not edges.numel():
        return x.new_zeros(x.shape[0], edges.shape[0])
    step = max(BLOCK // max(edges.numel(), 1), 1)
    return torch.cat([(edges * rows[:, None, :]).amax(-1) for rows in x.split(step)])
