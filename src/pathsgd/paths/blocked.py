"""Path-SGD on a chain of linear layers on a CPU, by blocks of rows that stay in the cache.

Written with whole tensors, a step reads and writes several copies of all weights, in new memory each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pathsgd.paths.chain import Chain, Moved, Moves, Rule, order_sums

BLOCK = 1 << 16
"""Entries of a block."""

CHECK_EVERY = 100
"""Steps between two that look whether numbers are in range."""

MAX_ROOT = 2.0**110
"""1 / sqrt(gamma) of every weight is between its inverse and it, so that fp32 holds it; fp64 holds more, but
then the other numbers are as far apart."""


class BlockedChain:
    """See :class:`pathsgd.paths.chain.ChainStep`."""

    def __init__(self, chain: Chain) -> None:
        self.count = len(chain)
        self.into = [torch.ones(layer.inputs, dtype=torch.float64) for layer in chain]
        self.out = [torch.ones(layer.outputs, dtype=torch.float64) for layer in chain]
        self.roots: list[tuple[Tensor, Tensor]] = []
        """Of every layer, gamma_in^(-1/p) and gamma_out^(-1/p)."""
        self.middles: list[float] = []
        """Powers of two by which the first of these is divided, and the second multiplied."""
        self._steps, self._fits = 0, True

    def measure(self, moves: Moves, p: int) -> bool:
        for layers in order_sums(self.count):
            for k, (rows, columns) in layers.items():
                weight, bias = moves[k]
                if rows:
                    self.into[k + 1].zero_()
                    if bias is not None:
                        powers = bias.parameter.detach().to(torch.float64, copy=True)
                        self.into[k + 1] += _raise(powers, p)
                if columns:
                    self.out[k - 1].zero_()
                self._sum(k, weight.parameter.detach(), p, rows, columns)
        self.roots = [
            (_invert_root(a, p), _invert_root(b, p)) for a, b in zip(self.into, self.out, strict=True)
        ]
        self._steps += 1
        if self._steps % CHECK_EVERY == 1 or not self._fits:
            extremes = [(_find_extremes(a), _find_extremes(b)) for a, b in self.roots]
            self.middles = [_find_middle(into) for into, _ in extremes]
            self._fits = all(_holds(into, out) for into, out in extremes)
        return self._fits

    def _sum(self, k: int, weight: Tensor, p: int, rows: bool, columns: bool) -> None:
        for place, powers in _take_blocks(weight, torch.float64):
            _raise(powers.copy_(weight[place]), p)
            if rows:
                self.into[k + 1][place].addmv_(powers, self.into[k])
            if columns:
                self.out[k - 1].addmv_(powers.t(), self.out[k][place])

    def move(self, moves: Moves, rule: Rule) -> None:
        for (weight, bias), (into, out), scale in zip(moves, self.roots, self.middles, strict=True):
            dtype = weight.parameter.dtype
            at_columns, at_rows = (into / scale).to(dtype), (out * scale).to(dtype)[:, None]
            for place, root in _take_blocks(weight.parameter, dtype):
                torch.mul(at_rows[place], at_columns, out=root)
                _move(weight, place, root, rule)
            if bias is not None:  # whose gamma_in is 1
                _move(bias, slice(None), out.to(dtype), rule)


def _take_blocks(like: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time: which, and memory for as many."""
    rows = max(1, BLOCK // max(1, like.shape[1]))
    buffer = torch.empty(min(rows, len(like)), like.shape[1], dtype=dtype)
    for start in range(0, len(like), rows):
        stop = min(start + rows, len(like))
        yield slice(start, stop), buffer[: stop - start]


def _move(moved: Moved, place: slice, root: Tensor, rule: Rule) -> None:
    """A step of some rows, given 1 / sqrt(gamma)."""
    w = moved.parameter.detach()[place]
    u = moved.grad[place] * root
    if rule.maximize:
        u.neg_()
    if moved.buffer is not None:
        b = moved.buffer[place].mul_(rule.momentum).add_(u)
        u = u.add_(b, alpha=rule.momentum) if rule.nesterov else b
    lr = float(moved.lr)
    if moved.weight_decay:
        w.mul_(1 - lr * moved.weight_decay)
    w.addcmul_(u, root, value=-lr)


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


Extremes = tuple[float, float]


def _find_extremes(x: Tensor) -> Extremes:
    """The least and the largest of numbers that are not 0; nan if there is one."""
    alive = x[x != 0]
    return (float(alive.min()), float(alive.max())) if alive.numel() else (1.0, 1.0)


def _find_middle(into: Extremes) -> float:
    """A power of two halfway between."""
    if not all(map(math.isfinite, into)):
        return 1.0
    return 2.0 ** round((math.log2(into[0]) + math.log2(into[1])) / 2)


def _holds(into: Extremes, out: Extremes) -> bool:
    """Whether fp32 holds all products, and both vectors once they are brought to the same middle."""
    numbers = (into[0] * out[0], into[1] * out[1], *out, into[1] / into[0], out[1] / out[0])
    return all(1 / MAX_ROOT <= x <= MAX_ROOT for x in numbers)  # nan is not
