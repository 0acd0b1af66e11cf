"""Path-SGD on a chain of linear layers on a CPU, by blocks of rows that stay in the cache.

Written with whole tensors, a step reads and writes several copies of all weights, in new memory each time. A
small network takes no longer than the calls of torch, so there are few: all vectors of a chain lie in one
tensor, each in units of a power of two. Powers of fp32 weights are summed in fp32; from time to time the same
is done in fp64 to see whether anything was lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pathsgd.paths.chain import Chain, Moved, Moves, Rule, order_sums
from pathsgd.paths.model_gammas import CHECK_EVERY

BLOCK = 1 << 19
"""Entries of a block."""

MAX_LOG_ROOT = 55
"""log2 of the largest 1 / sqrt(gamma), and of the inverse of the least, so that fp32 holds the square."""

LOST = 1e-5
"""Sums in fp32 and in fp64 differ by less than this, unless numbers were lost."""

MAX_EXPONENT = 100
"""Of units, their ratios and products, so that fp32 holds what is multiplied by them."""

DRIFT = 16.0
"""Roots that have grown or shrunk by more than this since they were in range are looked at again."""

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
        if self.vectors is None or self.vectors.p != p:
            self.vectors, self._steps = Vectors(self.chain, p), 0
        self._steps += 1
        if self._steps % CHECK_EVERY != 1 and self._fits:
            self.vectors.sum(moves, self.rounds)
            if self.vectors.are_as_before():
                return True
        self._fits = self._check(moves, self.vectors)
        return self._fits

    def _check(self, moves: Moves, vectors: Vectors) -> bool:
        """Takes the sums in fp64, too, and sees whether theirs are right and in range."""
        exact = Vectors(self.chain, vectors.p, torch.float64)
        exact.sum(moves, self.rounds)
        if not vectors.take_units(exact):
            return False
        vectors.sum(moves, self.rounds)
        vectors.range = vectors.find_range()
        return vectors.agree(exact) and vectors.are_in_range()

    def move(self, moves: Moves, rule: Rule) -> None:
        assert self.vectors is not None
        self.vectors.move(moves, rule)


class Vectors:
    """gamma_in of the inputs and gamma_out of the outputs of every layer, in units of powers of two."""

    @torch.inference_mode(False)  # a step outside of it writes the same memory
    def __init__(self, chain: Chain, p: int, dtype: torch.dtype = torch.float32) -> None:
        self.p, self.range = p, (1.0, 1.0, 0)
        lengths = [layer.inputs for layer in chain] + [layer.outputs for layer in chain]
        padded = [-(-n // ALIGNED) * ALIGNED for n in lengths]
        self.sums = torch.ones(sum(padded), dtype=dtype, device="cpu")
        self.roots = torch.empty_like(self.sums)
        sums, roots = (
            [view[:n] for view, n in zip(whole.split(padded), lengths, strict=True)]
            for whole in (self.sums, self.roots)
        )
        self.into, self.out = sums[: len(chain)], sums[len(chain) :]
        self.root_into, self.root_out = roots[: len(chain)], roots[len(chain) :]
        self.root_rows = [root[:, None] for root in self.root_out]
        self.in_units, self.out_units = [0] * len(chain), [0] * len(chain)
        """Binary exponents of the units, multiples of p."""
        self.blocks = [list(_cut(layer.outputs, layer.inputs)) for layer in chain]
        shapes = [(own[0][1], layer.inputs) for layer, own in zip(chain, self.blocks, strict=True)]
        scratch = torch.empty(max(map(math.prod, shapes)), dtype=dtype, device="cpu")
        self.scratch = [scratch[: math.prod(shape)].view(shape) for shape in shapes]
        """Memory for a block of every layer, the same for all."""

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

    def take_units(self, exact: Vectors) -> bool:
        """Takes units in which numbers lie around 1; false if the units are out of range themselves."""
        if not bool(exact.sums.isfinite().all()):
            return False
        into, out = (
            [round(sum(_find_ends(x)) / 2) // self.p * self.p for x in xs] for xs in (exact.into, exact.out)
        )
        self.in_units, self.out_units = into, out
        exponents = [*into, *out, *(a - b for units in (into, out) for a, b in pairwise(units))]
        exponents += [2 * (a + b) // self.p for a, b in zip(into, out, strict=True)]
        return max(map(abs, exponents)) <= MAX_EXPONENT

    def agree(self, exact: Vectors) -> bool:
        units = self.in_units + self.out_units
        pairs = zip(self.into + self.out, exact.into + exact.out, units, strict=True)
        return all(torch.allclose(a.double() * 2.0**unit, b, rtol=LOST, atol=0) for a, b, unit in pairs)

    def are_in_range(self) -> bool:
        """Whether fp32 holds the squares of all products, and of both vectors in their units."""
        logs: list[float] = []
        for into, out, u, v in zip(self.into, self.out, self.in_units, self.out_units, strict=True):
            for a, b in zip(_find_ends(into), _find_ends(out), strict=True):
                logs += [a, b, b + v, a + u + b + v]
        return all(abs(x) <= MAX_LOG_ROOT * self.p for x in logs)  # nan is not

    def are_as_before(self) -> bool:
        """Whether the range is about that of the last check, and as many numbers are 0."""
        (least, largest, alive), before, drift = self.find_range(), self.range, DRIFT**self.p
        return before[0] / drift <= least and largest <= before[1] * drift and alive == before[2]

    def find_range(self) -> tuple[float, float, int]:
        """The least and the largest number that is not 0, and how many are."""
        is_alive = self.sums != 0
        least, largest = torch.where(is_alive, self.sums, 1.0).aminmax()
        return float(least), float(largest), int(is_alive.sum())


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
    """Blocks of rows: the first row, and the one after the last."""
    step = max(1, BLOCK // columns)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


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


def _find_ends(x: Tensor) -> tuple[float, float]:
    """log2 of the least and of the largest of numbers that are not 0."""
    alive = x[x != 0]
    return (math.log2(alive.min()), math.log2(alive.max())) if alive.numel() else (0.0, 0.0)
