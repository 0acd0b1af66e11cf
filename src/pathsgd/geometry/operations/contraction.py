"""``y[o] = sum_i |W[o, i]|^p x[i]``: the step of Algorithm 1, in cache-sized blocks.

|W|^p is never stored whole: a block of W is read once, and its powers are used while they are in the cache.
"""

from __future__ import annotations

import functools
import math

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
        y = _max_product(rows, arithmetic.power_in_double(weight))
    elif torch.is_grad_enabled() and (weight.requires_grad or rows.requires_grad):
        y = rows @ arithmetic.power_in_double(weight).t()
    else:
        y = _contract_blocks(arithmetic, rows, weight)
    return arithmetic.center(Scaled(y.reshape(*lead, weight.shape[0]), x.exponent + exponent))


def adjoin_linear_weight(arithmetic: Arithmetic, x: Scaled, gradient: Scaled) -> Scaled:
    """``dF / d|W|^p``: the sum over positions of gamma_out(o) gamma_in(i)."""
    into, out = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (x.mantissa, gradient.mantissa))
    if math.isinf(arithmetic.p):
        value = into.new_zeros(out.shape[1], into.shape[1])
        for row, column in zip(out, into, strict=True):
            value = torch.maximum(value, torch.outer(row, column))
    else:
        value = out.t() @ into
    return Scaled(value, x.exponent + gradient.exponent)


def _contract_blocks(arithmetic: Arithmetic, x: Tensor, weight: Tensor) -> Tensor:
    """``x @ (|W|^p)^T``, block by block along the axis in which W lies contiguous in memory."""
    is_by_row = weight.stride(0) >= weight.stride(1)
    matrix = weight if is_by_row else weight.t()
    block = BLOCK if weight.device.type == "cpu" else BLOCK_ON_DEVICE
    step = max(block // max(matrix.shape[1], 1), 1)
    memory = matrix.new_empty(min(step, len(matrix)), matrix.shape[1], dtype=torch.float64)
    powers = (arithmetic.power_in_double(part, memory) for part in matrix.split(step))
    if is_by_row:
        return torch.cat([x @ part.t() for part in powers], 1)
    pairs = zip(x.split(step, 1), powers, strict=True)
    return functools.reduce(torch.add, (columns @ part for columns, part in pairs))


def _max_product(x: Tensor, edges: Tensor) -> Tensor:
    """``max_i edges[o, i] x[n, i]``."""
    if not edges.numel():
        return x.new_zeros(x.shape[0], edges.shape[0])
    step = max(BLOCK // max(edges.numel(), 1), 1)
    return torch.cat([(edges * rows[:, None, :]).amax(-1) for rows in x.split(step)])
