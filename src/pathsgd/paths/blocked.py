"""Path-SGD on a chain of linear layers on a CPU, by blocks of rows that stay in the cache.

Written with whole tensors, a step reads and writes several copies of all weights, in new memory each time. A
small network takes no longer than the calls of torch, so there are few: all vectors of a chain lie in one
tensor, each in units of a power of two. Powers of fp32 weights are summed in fp32; from time to time the same
is done in fp64 to see whether anything was lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pathsgd.paths.chain import Chain, Moved, Moves, Rule, order_sums
from pathsgd.paths.model_gammas import CHECK_EVERY

BLOCK = 1 << 19
"""Entries of a block."""

MAX_ROOT = 2.0**55
"""1 / sqrt(gamma) of every weight is between its inverse and it, so that fp32 holds its square."""

LOST = 1e-3
"""Sums in fp32 and in fp64 differ by less than this, unless numbers were lost."""

MAX_UNIT = 500
"""Binary exponent of a unit; numbers that need larger ones are out of range."""

ALIGNED = 16
"""Entries: every vector begins at a multiple of these, so that equal networks are summed alike."""


class BlockedChain:
    """See :class:`pathsgd.paths.chain.ChainStep`."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.rounds = order_sums(len(chain))
        self.vectors: Vectors | None = None
        self._steps, self._fits = 0, True

    def measure(self, moves: Moves, p: int) -> bool:
        dtype = moves[0][0].parameter.dtype
        if self.vectors is None or self.vectors.sums.dtype != dtype or self.vectors.p != p:
            self.vectors = Vectors(self.chain, p, dtype)
            self._steps = 0
        self._steps += 1
        if self._steps % CHECK_EVERY == 1 or not self._fits:
            exact = Vectors(self.chain, p, torch.float64)
            exact.sum(moves, self.rounds)
            self.vectors.take_units(exact)
            self.vectors.sum(moves, self.rounds)
            self._fits = self.vectors.agree(exact) and self.vectors.are_in_range()
        else:
            self.vectors.sum(moves, self.rounds)
        return self._fits

    def move(self, moves: Moves, rule: Rule) -> None:
        assert self.vectors is not None
        self.vectors.move(moves, rule)


class Vectors:
    """gamma_in of the inputs and gamma_out of the outputs of every layer, in units of powers of two."""

    def __init__(self, chain: Chain, p: int, dtype: torch.dtype) -> None:
        self.p, self.count = p, len(chain)
        lengths = [layer.inputs for layer in chain] + [layer.outputs for layer in chain]
        padded = [-(-n // ALIGNED) * ALIGNED for n in lengths]
        places = [(end - room, n) for n, room, end in zip(lengths, padded, accumulate(padded), strict=True)]
        self.sums = torch.ones(sum(padded), dtype=dtype)
        self.roots = torch.empty_like(self.sums)
        self.into, self.out = self._split(self.sums, places)
        self.root_into, self.root_out = self._split(self.roots, places)
        self.root_rows = [root[:, None] for root in self.root_out]
        self.in_units, self.out_units = [0] * self.count, [0] * self.count
        """Binary exponents of the units, multiples of p."""
        self.blocks = [list(_cut(layer.outputs, layer.inputs)) for layer in chain]
        shapes = [(own[0][1], layer.inputs) for layer, own in zip(chain, self.blocks, strict=True)]
        scratch = torch.empty(max(map(math.prod, shapes)), dtype=dtype)
        self.scratch = [scratch[: math.prod(shape)].view(shape) for shape in shapes]
        """Memory for a block of every layer, the same for all."""

    def _split(self, whole: Tensor, places: Sequence[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        views = [whole[start : start + length] for start, length in places]
        return views[: self.count], views[self.count :]

    def sum(self, moves: Moves, rounds: Sequence[dict[int, tuple[bool, bool]]]) -> None:
        for layers in rounds:
            for k, (rows, columns) in layers.items():
                self._sum_layer(k, *moves[k], rows, columns)

    def _sum_layer(self, k: int, weight: Moved, bias: Moved | None, rows: bool, columns: bool) -> None:
        w, scratch, beta = weight.parameter.detach(), self.scratch[k], 0.0
        if rows:
            scale = 2.0 ** (self.in_units[k] - self.in_units[k + 1])
            if bias is not None:
                _raise(bias.parameter.detach(), self.p, self.into[k + 1])
                beta = 2.0 ** -self.in_units[k + 1]
        if columns:
            back = 2.0 ** (self.out_units[k] - self.out_units[k - 1])
        for start, stop in self.blocks[k]:
            powers = scratch[: stop - start]
            _raise(w[start:stop], self.p, powers)
            if rows:
                self.into[k + 1][start:stop].addmv_(powers, self.into[k], beta=beta, alpha=scale)
            if columns:
                out = self.out[k][start:stop]
                self.out[k - 1].addmv_(powers.t(), out, beta=float(start > 0), alpha=back)

    def move(self, moves: Moves, rule: Rule) -> None:
        power = 1 if rule.momentum else 2
        _invert_root(self.sums, self.p / power, self.roots)
        for k, (weight, bias) in enumerate(moves):
            unit = 2.0 ** -((self.in_units[k] + self.out_units[k]) * power // self.p)
            bias_unit = 2.0 ** -(self.out_units[k] * power // self.p)
            if rule.momentum:
                for start, stop in self.blocks[k]:
                    root = self.scratch[k][: stop - start]
                    torch.mul(self.root_rows[k][start:stop], self.root_into[k], out=root)
                    _move_with_momentum(weight, slice(start, stop), root, unit, rule)
                if bias is not None:
                    _move_with_momentum(bias, slice(None), self.root_out[k], bias_unit, rule)
            else:
                for start, stop in self.blocks[k]:
                    u = self.scratch[k][: stop - start]
                    torch.mul(weight.grad[start:stop], self.root_rows[k][start:stop], out=u)
                    _move(weight, slice(start, stop), u, self.root_into[k], unit, rule)
                if bias is not None:
                    _move(bias, slice(None), bias.grad, self.root_out[k], bias_unit, rule)

    def take_units(self, exact: Vectors) -> None:
        """Units in which numbers lie around 1."""
        self.in_units, self.out_units = (
            [max(-MAX_UNIT, min(_find_middle(x), MAX_UNIT)) // self.p * self.p for x in own]
            for own in (exact.into, exact.out)
        )

    def agree(self, exact: Vectors) -> bool:
        units = self.in_units + self.out_units
        pairs = zip(self.into + self.out, exact.into + exact.out, units, strict=True)
        return all(torch.allclose(a.double() * 2.0**unit, b, rtol=LOST, atol=0) for a, b, unit in pairs)

    def are_in_range(self) -> bool:
        """Whether fp32 holds the squares of all products, and of both vectors in their units."""
        numbers: list[float] = []
        for into, out, *units in zip(self.into, self.out, self.in_units, self.out_units, strict=True):
            ends = _find_extremes(into), _find_extremes(out)
            numbers += [*ends[0], *ends[1]]
            numbers += [a * 2.0 ** units[0] * b * 2.0 ** units[1] for a, b in zip(*ends, strict=True)]
            numbers += [b * 2.0 ** units[1] for b in ends[1]]
        return all(1 / MAX_ROOT <= x ** (1 / self.p) <= MAX_ROOT for x in numbers)  # nan is not


def _move(moved: Moved, place: slice, u: Tensor, at_columns: Tensor, unit: float, rule: Rule) -> None:
    """``w - lr g / gamma``."""
    w, lr = moved.parameter.detach()[place], float(moved.lr)
    if moved.weight_decay:
        w.mul_(1 - lr * moved.weight_decay)
    w.addcmul_(u, at_columns, value=(lr if rule.maximize else -lr) * unit)


def _move_with_momentum(moved: Moved, place: slice, root: Tensor, unit: float, rule: Rule) -> None:
    assert moved.buffer is not None
    w, grad, lr = moved.parameter.detach()[place], moved.grad[place], float(moved.lr)
    sign = -unit if rule.maximize else unit
    b = moved.buffer[place].mul_(rule.momentum)
    b.addcmul_(grad, root, value=sign)
    u = (grad * root).mul_(sign).add_(b, alpha=rule.momentum) if rule.nesterov else b
    if moved.weight_decay:
        w.mul_(1 - lr * moved.weight_decay)
    w.addcmul_(u, root, value=-lr * unit)


def _cut(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Blocks of rows, at least one: the first row, and the one after the last."""
    step = max(1, BLOCK // max(1, columns))
    return ((start, min(start + step, rows)) for start in range(0, max(rows, 1), step))


def _raise(x: Tensor, p: int, out: Tensor) -> Tensor:
    """``|x|^p``."""
    if x.dtype != out.dtype:
        x = out.copy_(x)
    if p == 1:
        return torch.abs(x, out=out)
    torch.mul(x, x, out=out)
    return out.mul_(out) if p == 4 else out


def _invert_root(x: Tensor, order: float, out: Tensor) -> Tensor:
    """``x^(-1/order)`` for an order of 1/2, 1, 2 or 4; 0 for 0."""
    if order <= 1:
        torch.reciprocal(x, out=out)
        if order < 1:
            out.mul_(out)
    else:
        torch.rsqrt(torch.sqrt(x, out=out) if order == 4 else x, out=out)
    return out.nan_to_num_(nan=math.nan, posinf=0.0)


def _find_extremes(x: Tensor) -> tuple[float, float]:
    """The least and the largest of numbers that are not 0; nan if there is one."""
    alive = x[x != 0]
    return (float(alive.min()), float(alive.max())) if alive.numel() else (1.0, 1.0)


def _find_middle(x: Tensor) -> int:
    """The binary exponent halfway between the least and the largest."""
    ends = _find_extremes(x)
    return round(sum(map(math.log2, ends)) / 2) if all(map(math.isfinite, ends)) else 0
