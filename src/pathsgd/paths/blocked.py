"""Path-SGD on a chain of linear layers on a CPU, by blocks of rows that stay in the cache.

Written with whole tensors, a step reads and writes several copies of all weights, in new memory each time.
Powers of fp32 weights are summed in fp32, each vector in units of its largest number; from time to time the
same is done in fp64 to see whether anything was lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pathsgd.paths.chain import Chain, Moved, Moves, Rule, order_sums

BLOCK = 1 << 18
"""Entries of a block."""

CHECK_EVERY = 100
"""Steps between two that look whether numbers are in range."""

MAX_ROOT = 2.0**55
"""1 / sqrt(gamma) of every weight is between its inverse and it, so that fp32 holds its square."""

LOST = 1e-3
"""Sums in fp32 and in fp64 differ by less than this, unless numbers were lost."""


class Sums(NamedTuple):
    """gamma_in of the inputs and gamma_out of the outputs of every layer."""

    into: list[Tensor]
    out: list[Tensor]


class BlockedChain:
    """See :class:`pathsgd.paths.chain.ChainStep`."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.roots: list[tuple[Tensor, Tensor]] = []
        """gamma_in^(-1/p) and gamma_out^(-1/p) of every layer."""
        self._steps, self._fits = 0, True
        self._middles = [1.0] * len(chain)
        """Powers of two by which the first of these is divided, and the second multiplied."""

    def measure(self, moves: Moves, p: int) -> bool:
        sums = self._sum(moves, p, moves[0][0].parameter.dtype)
        self.roots = [(_invert_root(a, p), _invert_root(b, p)) for a, b in zip(*sums, strict=True)]
        self._steps += 1
        if self._steps % CHECK_EVERY == 1 or not self._fits:
            exact = self._sum(moves, p, torch.float64)
            extremes = [(_find_extremes(a), _find_extremes(b)) for a, b in self.roots]
            self._middles = [_find_middle(into) for into, _ in extremes]
            self._fits = _agree(sums, exact) and all(_holds(*both) for both in extremes)
        return self._fits

    def _sum(self, moves: Moves, p: int, dtype: torch.dtype) -> Sums:
        into = [torch.ones(layer.inputs, dtype=torch.float64) for layer in self.chain]
        out = [torch.ones(layer.outputs, dtype=torch.float64) for layer in self.chain]
        for layers in order_sums(len(self.chain)):
            for k, (rows, columns) in layers.items():
                weight, bias = moves[k]
                at_columns, column_unit = _scale(into[k], dtype)
                at_rows, row_unit = _scale(out[k], dtype)
                by_row, by_column = torch.empty_like(at_rows), torch.zeros_like(at_columns)
                for place, powers in _take_blocks(weight.parameter, dtype):
                    _take_powers(weight.parameter.detach()[place], p, powers)
                    if rows:
                        torch.mv(powers, at_columns, out=by_row[place])
                    if columns:
                        by_column.addmv_(powers.t(), at_rows[place])
                if rows:
                    into[k + 1] = by_row.double() * column_unit
                    if bias is not None:
                        into[k + 1] += _raise(bias.parameter.detach().to(torch.float64, copy=True), p)
                if columns:
                    out[k - 1] = by_column.double() * row_unit
        return Sums(into, out)

    def move(self, moves: Moves, rule: Rule) -> None:
        for (weight, bias), (into, out), middle in zip(moves, self.roots, self._middles, strict=True):
            into, scaled = into / middle, (out * middle)[:, None]
            if rule.momentum:
                _move_with_momentum(weight, into, scaled, rule)
            else:
                _move(weight, into, scaled, rule)
            if bias is not None:  # whose gamma_in is 1
                one = torch.ones((), dtype=torch.float64)
                (_move_with_momentum if rule.momentum else _move)(bias, one, out, rule)


def _move(moved: Moved, into: Tensor, out: Tensor, rule: Rule) -> None:
    """``w - lr g / gamma``: two products a block, with the squares of the roots."""
    w, lr = moved.parameter.detach(), float(moved.lr)
    at_columns = (into * into).to(w.dtype)
    at_rows = (out * out * (lr if rule.maximize else -lr)).to(w.dtype)
    for place, u in _take_blocks(w, w.dtype):
        torch.mul(moved.grad[place], at_rows[place], out=u)
        if moved.weight_decay:
            w[place].mul_(1 - lr * moved.weight_decay)
        w[place].addcmul_(u, at_columns)


def _move_with_momentum(moved: Moved, into: Tensor, out: Tensor, rule: Rule) -> None:
    w, lr = moved.parameter.detach(), float(moved.lr)
    assert moved.buffer is not None
    at_columns, at_rows = into.to(w.dtype), out.to(w.dtype)
    for place, root in _take_blocks(w, w.dtype):
        torch.mul(at_rows[place], at_columns, out=root)
        b = moved.buffer[place].mul_(rule.momentum)
        b.addcmul_(moved.grad[place], root, value=-1 if rule.maximize else 1)
        u = b
        if rule.nesterov:
            h = moved.grad[place] * root
            u = (h.neg_() if rule.maximize else h).add_(b, alpha=rule.momentum)
        if moved.weight_decay:
            w[place].mul_(1 - lr * moved.weight_decay)
        w[place].addcmul_(u, root, value=-lr)


def _take_blocks(like: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time: which, and memory for as many."""
    rows = max(1, BLOCK // max(1, math.prod(like.shape[1:])))
    buffer = torch.empty(min(rows, len(like)), *like.shape[1:], dtype=dtype)
    for start in range(0, len(like), rows):
        stop = min(start + rows, len(like))
        yield slice(start, stop), buffer[: stop - start]


def _scale(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Numbers in units of a power of two near the largest, and that unit."""
    largest = float(x.max()) if dtype != torch.float64 and x.numel() else 1.0
    unit = math.ldexp(1.0, math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
    return (x / unit).to(dtype), unit


def _take_powers(x: Tensor, p: int, into: Tensor) -> None:
    """``|x|^p``, in two passes over the block only where there must be two."""
    if p == 2 and x.dtype == into.dtype:
        torch.mul(x, x, out=into)
    else:
        _raise(into.copy_(x), p)


def _raise(x: Tensor, p: int) -> Tensor:
    """``|x|^p``, in place."""
    if p == 1:
        return x.abs_()
    for _ in range(p // 2):
        x.mul_(x)
    return x


def _invert_root(x: Tensor, p: int) -> Tensor:
    """``x^(-1/p)``, 0 for 0."""
    if p == 1:
        root = x.reciprocal()
    else:
        root = (x.sqrt() if p == 4 else x).rsqrt()
    return root.nan_to_num_(nan=math.nan, posinf=0.0)


# Range


def _agree(sums: Sums, exact: Sums) -> bool:
    pairs = zip([*sums.into, *sums.out], [*exact.into, *exact.out], strict=True)
    return all(torch.allclose(a, b, rtol=LOST, atol=0) for a, b in pairs)


Extremes = tuple[float, float]


def _find_extremes(x: Tensor) -> Extremes:
    """The least and the largest of numbers that are not 0; nan if there is one."""
    alive = x[x != 0]
    return (float(alive.min()), float(alive.max())) if alive.numel() else (1.0, 1.0)


def _find_middle(ends: Extremes) -> float:
    """A power of two halfway between."""
    if not all(map(math.isfinite, ends)):
        return 1.0
    return 2.0 ** round((math.log2(ends[0]) + math.log2(ends[1])) / 2)


def _holds(into: Extremes, out: Extremes) -> bool:
    """Whether fp32 holds the squares of all products, and of both vectors once they have the same middle."""
    numbers: Sequence[float] = (into[0] * out[0], into[1] * out[1], *out, into[1] / into[0], out[1] / out[0])
    return all(1 / MAX_ROOT <= x <= MAX_ROOT for x in numbers)  # nan is not
