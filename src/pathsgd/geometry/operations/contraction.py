"""``y[o] = sum_i |W[o, i]|^p x[i]``: the step of Algorithm 1, in cache-sized blocks.

|W|^p is never stored whole: a block of W is read once, and its powers are used while they are in the cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pathsgd.geometry.extended_float import DEAD, Arithmetic, ExtendedFloat, exact_ldexp
from pathsgd.geometry.operations.extended_views import cat
from pathsgd.geometry.sharded import contract_shards
from pathsgd.graph.sharded import is_sharded

BLOCK = 1 << 18
"""Entries of W in one block: about a megabyte in fp32, so that it stays in a core's cache."""

BLOCK_ON_DEVICE = 1 << 25
"""Elsewhere a block only bounds the memory: few large kernels are faster than many small ones."""


def contract(arithmetic: Arithmetic, x: ExtendedFloat, weight: Tensor) -> ExtendedFloat:
    """A linear layer in the powered network; ``x`` has its units on the last axis."""
    if is_sharded(weight):
        return contract_shards(contract, arithmetic, x, weight)
    if x.exponent is not None:
        return _contract_with_exponents(arithmetic, x, weight)
    weight = weight.to(arithmetic.dtype)
    lead = x.mantissa.shape[:-1]
    rows = x.mantissa.reshape(math.prod(lead), x.mantissa.shape[-1])
    if math.isinf(arithmetic.p):
        y = _max_product(rows, arithmetic.power(weight))
    elif torch.is_grad_enabled() and (weight.requires_grad or rows.requires_grad):
        y = rows @ arithmetic.power(weight).t()
    else:
        y = _contract_blocks(arithmetic, rows, weight)
    return ExtendedFloat(y.reshape(*lead, weight.shape[0]))


def linear_weight_adjoint(arithmetic: Arithmetic, x: ExtendedFloat, gradient: ExtendedFloat) -> ExtendedFloat:
    """``dF / d|W|^p``: the sum over positions of gamma_out(o) gamma_in(i)."""
    lead = list(range(x.mantissa.dim() - 1))
    x, gradient = arithmetic.align(x, lead), arithmetic.align(gradient, lead)
    into = x.mantissa.reshape(-1, x.mantissa.shape[-1])
    out = gradient.mantissa.reshape(-1, gradient.mantissa.shape[-1])
    if math.isinf(arithmetic.p):
        value = into.new_zeros(out.shape[1], into.shape[1])
        for row, column in zip(out, into, strict=True):
            value = torch.maximum(value, torch.outer(row, column))
    else:
        value = out.t() @ into
    if x.exponent is None or gradient.exponent is None:
        return ExtendedFloat(value)
    head = gradient.exponent.expand(*(1,) * len(lead), out.shape[1]).reshape(-1, 1)
    tail = x.exponent.expand(*(1,) * len(lead), into.shape[1]).reshape(1, -1)
    return arithmetic.normalise(ExtendedFloat(value, (head + tail).clamp(min=DEAD)))


def _contract_blocks(arithmetic: Arithmetic, x: Tensor, weight: Tensor) -> Tensor:
    """``x @ (|W|^p)^T``, block by block along the axis in which W lies contiguous in memory."""
    outputs, inputs = weight.shape
    block_size = BLOCK if weight.device.type == "cpu" else BLOCK_ON_DEVICE
    if weight.numel() <= block_size:
        return x @ arithmetic.power(weight).t()
    if weight.stride(0) >= weight.stride(1):
        step = max(block_size // inputs, 1)
        parts = [x @ arithmetic.power(block).t() for block in weight.split(step)]
        return torch.cat(parts, 1)
    step = max(block_size // outputs, 1)
    y = x.new_zeros(x.shape[0], outputs)
    for columns, block in zip(x.split(step, 1), weight.split(step, 1), strict=True):
        y = y.addmm(columns, arithmetic.power(block).t())
    return y


def _max_product(x: Tensor, edges: Tensor) -> Tensor:
    """``max_i edges[o, i] x[n, i]``."""
    if not edges.numel():
        return x.new_zeros(x.shape[0], edges.shape[0])
    step = max(BLOCK // max(edges.numel(), 1), 1)
    parts = [(edges * rows[:, None, :]).amax(-1) for rows in x.split(step)]
    return torch.cat(parts)


def _contract_with_exponents(arithmetic: Arithmetic, x: ExtendedFloat, weight: Tensor) -> ExtendedFloat:
    assert x.exponent is not None
    ndim = x.mantissa.dim()
    for dim in range(ndim - 1):
        exponent = x.exponent
        if exponent.shape[dim] > 1:
            first = exponent.narrow(dim, 0, 1)
            if bool((exponent == first).all()):
                x = ExtendedFloat(x.mantissa, first)
                continue
            # Positions whose exponents differ are contracted apart, so that none is lost.
            parts = [
                _contract_with_exponents(
                    arithmetic,
                    ExtendedFloat(x.mantissa.narrow(dim, k, 1), exponent.narrow(dim, k, 1)),
                    weight,
                )
                for k in range(exponent.shape[dim])
            ]
            return cat(parts, dim)
    assert x.exponent is not None
    weight = weight.to(arithmetic.dtype)
    lead = x.mantissa.shape[:-1]
    rows = x.mantissa.reshape(math.prod(lead), x.mantissa.shape[-1])
    tail = x.exponent.expand(*x.exponent.shape[:-1], weight.shape[1]).reshape(-1)
    outputs, exponents = [], []
    block_size = BLOCK if weight.device.type == "cpu" else BLOCK_ON_DEVICE
    for block in weight.split(max(block_size // max(weight.shape[1], 1), 1)):
        edges, exponent = fold_exponents(arithmetic, block, tail)
        exponents.append(exponent)
        outputs.append(_max_product(rows, edges) if math.isinf(arithmetic.p) else rows @ edges.t())
    y = torch.cat(outputs, 1).reshape(*lead, weight.shape[0])
    head = torch.cat(exponents).reshape((1,) * (ndim - 1) + (-1,))
    return arithmetic.normalise(ExtendedFloat(y, head))


def fold_exponents(arithmetic: Arithmetic, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """``|W[o, ...] 2^(tail - head_o)|^p`` and ``head``, chosen so that the largest entry of each row
    lies in [1/2, 1) before the power. ``tail`` broadcasts against ``weight``."""
    if not weight.numel():
        return weight, torch.full((weight.shape[0],), DEAD, dtype=torch.int32, device=weight.device)
    detached = weight.detach()
    exponent = torch.frexp(detached).exponent + tail
    exponent = torch.where((detached == 0) | (tail <= DEAD // 2), DEAD, exponent)
    head = exponent.reshape(weight.shape[0], -1).amax(1)
    column = head.reshape(-1, *(1,) * (weight.dim() - 1))
    alive = exponent > DEAD // 2
    edges = arithmetic.power(exact_ldexp(weight, torch.where(alive, tail - column, 0)))
    return torch.where(alive, edges, 0), head
