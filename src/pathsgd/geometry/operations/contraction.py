"""``y[o] = sum_i |W[o, i]|^p x[i]``: the step of Algorithm 1, in cache-sized blocks.

|W|^p is never stored whole: a block of W is read once, and its powers are used while they are in the cache.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pathsgd._torch import are_plain, is_capturing, is_plain, is_transforming
from pathsgd.geometry.extended_float import DEAD, Arithmetic, ExtendedFloat, safe_range
from pathsgd.geometry.operations.exponent_folding import fold_exponents
from pathsgd.geometry.operations.extended_views import cat, stack
from pathsgd.geometry.sharded import contract_shards
from pathsgd.graph.sharded import is_sharded

BLOCK = 1 << 20
"""Entries of W in one block: few enough to stay in the cache, many enough that calls of torch cost little."""

BLOCK_ON_DEVICE = 1 << 25
"""Elsewhere a block only bounds the memory: few large kernels are faster than many small ones."""


def contract(arithmetic: Arithmetic, x: ExtendedFloat, weight: Tensor) -> ExtendedFloat:
    """A linear layer in the powered network; ``x`` has its units on the last axis."""
    if is_sharded(weight):
        return contract_shards(contract, arithmetic, x, weight)
    weight = arithmetic.cast(weight)
    if x.exponent is None:
        return ExtendedFloat(_contract(arithmetic, x.mantissa, weight))
    found = None
    if weight.numel() and not is_capturing() and not is_transforming():  # else no value can be looked at
        found = _contract_in_one_frame(arithmetic, x, weight)
    return found or _contract_by_unit(arithmetic, x, weight)


def _contract(arithmetic: Arithmetic, x: Tensor, weight: Tensor) -> Tensor:
    lead = x.shape[:-1]
    rows = x.reshape(math.prod(lead), x.shape[-1])
    if math.isinf(arithmetic.p):
        y = _max_product(rows, arithmetic.power(weight))
    elif torch.is_grad_enabled() and (weight.requires_grad or rows.requires_grad):
        y = rows @ arithmetic.power(weight).t()
    else:
        y = _contract_blocks(arithmetic, rows, weight)
    return y.reshape(*lead, weight.shape[0])


def _contract_in_one_frame(arithmetic: Arithmetic, x: ExtendedFloat, weight: Tensor) -> ExtendedFloat | None:
    """The inputs in units of the largest, and then plain floats: it costs what a plain pass does. None if an
    input is lost, or a sum is too small or too large to be trusted, unless no path reaches it."""
    assert x.exponent is not None
    frame = x.exponent.amax(-1, keepdim=True)
    inputs = arithmetic.shift(x.mantissa, x.exponent - frame)
    y = _contract(arithmetic, inputs, weight)
    sums = y.detach().reshape(-1, weight.shape[0])
    if not fits_one_frame(x, inputs, sums):
        return None
    zero = (sums == 0).any(0)
    if bool(zero.any()):
        reached = (x.mantissa.detach() > 0).reshape(-1, weight.shape[1]).any(0)
        if bool(((weight.detach()[zero] != 0) & reached).any()):
            return None
    return arithmetic.keep_in_range(ExtendedFloat(y, frame.expand(*frame.shape[:-1], weight.shape[0])))


def fits_one_frame(x: ExtendedFloat, inputs: Tensor, sums: Tensor) -> bool:
    """Whether the inputs that live are normal numbers in the units of the largest, and plain floats can be
    trusted with the sums. Zeros are let pass."""
    _, low, high = safe_range(sums.dtype)
    kept = (inputs.detach() >= torch.finfo(inputs.dtype).tiny) | (x.mantissa.detach() == 0)
    trusted = ((sums >= low) & (sums <= high)) | (sums == 0)
    return bool(kept.all() & trusted.all())


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
    exponent = gradient.exponent.reshape(-1, 1) + x.exponent.reshape(1, -1)
    return arithmetic.normalise_now(ExtendedFloat(value, exponent.clamp(min=DEAD)))


def add_outer_products(
    arithmetic: Arithmetic, uses: Sequence[tuple[ExtendedFloat, ExtendedFloat]]
) -> ExtendedFloat:
    """The sum of ``gamma_out(o) gamma_in(i)`` over the uses of a matrix, given as pairs of vectors."""
    out, into = map(stack, zip(*uses, strict=True))
    if out.exponent is not None:
        by_row, whole = arithmetic.align(out, [0]), arithmetic.align(into, [0, 1])
        _, low, _ = safe_range(arithmetic.dtype)
        lost = [(x.mantissa > 0) & (y.mantissa < low) for x, y in ((out, by_row), (into, whole))]
        if is_capturing() or any(bool(each.any()) for each in lost):
            # Uses at different depths may be so far apart that one exponent does not hold them.
            return arithmetic.add([linear_weight_adjoint(arithmetic, x, gradient) for gradient, x in uses])
        out, into = by_row, whole
    return linear_weight_adjoint(arithmetic, into, out)


def _contract_blocks(arithmetic: Arithmetic, x: Tensor, weight: Tensor) -> Tensor:
    """``x @ (|W|^p)^T``, block by block along the axis in which W lies contiguous in memory."""
    outputs, inputs = weight.shape
    block_size = BLOCK if weight.device.type == "cpu" else BLOCK_ON_DEVICE
    if weight.stride(0) >= weight.stride(1):
        parts = [x @ edges.t() for edges in _powers(arithmetic, weight, max(block_size // max(inputs, 1), 1))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    step = max(block_size // max(outputs, 1), 1)
    blocks = zip(x.split(step, 1), _powers(arithmetic, weight.t(), step), strict=True)
    # A sum of sums: a vocabulary of numbers added one by one would lose two digits.
    return functools.reduce(torch.add, (columns @ edges for columns, edges in blocks))


_scratch = threading.local()


def _powers(arithmetic: Arithmetic, weight: Tensor, rows: int) -> Iterator[Tensor]:
    """``|W|^p``, so many rows at a time. On a CPU the squares are written to the same memory each time, which
    takes a fifth of the time that new memory does."""
    blocks = weight.split(rows)
    plain = weight.device.type == "cpu" and is_plain(weight)
    if not plain or arithmetic.p != 2 or arithmetic.as_given:
        yield from map(arithmetic.power, blocks)
        return
    kept = getattr(_scratch, "block", None)
    if kept is None or kept.dtype != weight.dtype or kept.numel() < blocks[0].numel():
        with torch.inference_mode(False):  # else nothing outside of it could write there
            _scratch.block = kept = torch.empty(blocks[0].numel(), dtype=weight.dtype, device="cpu")
    for block in blocks:
        yield torch.mul(block, block, out=kept[: block.numel()].view(block.shape))


def _max_product(x: Tensor, edges: Tensor) -> Tensor:
    """``max_i edges[o, i] x[n, i]``."""
    if not edges.numel():
        return x.new_zeros(x.shape[0], edges.shape[0])
    step = max(BLOCK // max(edges.numel(), 1), 1)
    parts = [(edges * rows[:, None, :]).amax(-1) for rows in x.split(step)]
    return torch.cat(parts)


def _contract_by_unit(arithmetic: Arithmetic, x: ExtendedFloat, weight: Tensor) -> ExtendedFloat:
    """With an exponent for every output, folded into the weights before the power."""
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
                contract(
                    arithmetic,
                    ExtendedFloat(x.mantissa.narrow(dim, k, 1), exponent.narrow(dim, k, 1)),
                    weight,
                )
                for k in range(exponent.shape[dim])
            ]
            return cat(parts, dim)
    assert x.exponent is not None
    tail = x.exponent.expand(*x.exponent.shape[:-1], weight.shape[1]).reshape(1, -1)
    if weight.device.type == "cpu" and are_plain([weight, tail]):
        # Laid out as the weight is, so that sums are taken in the order of those in one frame.
        edges, head = torch.empty_like(weight), tail.new_empty(len(weight))
        step = max(BLOCK // max(weight.shape[1], 1), 1)
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            edges[rows], head[rows] = fold_exponents(arithmetic, weight[rows], tail)
    else:
        edges, head = fold_exponents(arithmetic, weight, tail)
    y = _contract(replace(arithmetic, as_given=True), x.mantissa, edges)
    return arithmetic.keep_in_range(ExtendedFloat(y, head.reshape((1,) * (ndim - 1) + (-1,))))
