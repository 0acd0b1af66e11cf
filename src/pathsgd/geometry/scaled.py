"""Path weights: numbers in fp64 with one common power of two, and their sums and products.

A path weight of a deep network does not fit a float: it shrinks or grows by a factor with every layer. The
numbers of one layer are close to each other by comparison, so one exponent for a whole tensor is enough:
``Scaled(m, n)`` stands for ``m * 2^(p n)``. fp64 holds numbers that differ by 2^2000. fp32 weights differ by
2^277 at most, their fourth powers by 2^1108: :func:`pathsgd.geometry.passes.check_range` says where that is
not enough. Powers of two are exact, so a network whose units were rescaled by powers of two is rounded alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pathsgd._torch import are_plain
from pathsgd.graph.nodes import Operation
from pathsgd.graph.views import view_tensor

DEAD = -(2.0**40)
"""The exponent of zeros: lower than any other, so that they never set the exponent of a sum."""

MAX_PLAIN_P = 4
"""Up to here powers of fp32 weights are within fp64; for higher orders, and of fp64 weights, they are divided
by a power of two first."""


class Scaled(NamedTuple):
    """``mantissa * 2^(p * exponent)``: a tensor in fp64 and one whole number, in fp64 as well."""

    mantissa: Tensor
    exponent: Tensor


def make_zero(device: torch.device) -> Tensor:
    """The exponent 0."""
    return torch.zeros((), dtype=torch.float64, device=device)


def scale_by_power(x: Tensor, n: Tensor) -> Tensor:
    """``x * 2^n`` exactly, in two halves because 2^n alone may be out of range where the product is not."""
    half = (n / 2).floor()
    return x * torch.exp2(half) * torch.exp2(n - half)


@dataclass(frozen=True)
class Arithmetic:
    """The sums and products of the powered network for one ``p``.

    For ``p = inf`` every sum is a maximum and weights enter with power one.
    """

    p: float
    centered: bool = True
    """Whether numbers are kept around 1 by exponents. Without, which takes a fraction of the calls of torch,
    all exponents are 0: fp64 alone holds the path weights of most networks."""
    as_given: bool = False
    """Weights enter as they are, signed."""

    @property
    def order(self) -> float:
        """p, but 1 for ``p = inf``: what weights are raised to, and what one step of an exponent stands
        for."""
        return 1.0 if math.isinf(self.p) else self.p

    def power(self, w: Tensor) -> Tensor:
        """``|w|^p``, by multiplications alone where p is a small integer: those are exact under
        scaling by powers of two."""
        if self.as_given:
            return w
        if self.p == 2:
            return w * w
        if self.order == 1:
            return w.abs()
        if self.order != int(self.order) or self.order > 64:
            if w.requires_grad:
                # A second derivative of |w|^p at 0 would be inf times 0 for p < 2.
                return torch.where(w == 0, 0, torch.where(w == 0, 1, w).abs().pow(self.order))
            return w.abs().pow(self.order)
        return _multiply_up(w if self.order % 2 == 0 else w.abs(), int(self.order))

    def power_in_double(self, w: Tensor, memory: Tensor | None = None) -> Tensor:
        """``|w|^p`` of weights of any precision, in fp64; in ``memory``, where nothing differentiates it."""
        if self.p == 2 and not self.as_given and are_plain([w]):
            x = w.to(torch.float64, copy=True) if memory is None else memory[: len(w)].copy_(w)
            return x.mul_(x)
        return self.power(w.double())

    def root(self, x: Tensor) -> Tensor:
        """``x^(1/p)``; for ``p = inf`` path weights carry power one already."""
        if self.order == 1:
            return x
        halvings = math.log2(self.order)
        if not halvings.is_integer():
            return x.pow(1 / self.order)
        for _ in range(int(halvings)):
            x = x.sqrt()
        return x

    def shift(self, x: Tensor, n: Tensor) -> Tensor:
        """``x * 2^(p n)``."""
        return scale_by_power(x, self.order * n)

    def center(self, x: Scaled) -> Scaled:
        """Returns the numbers of x with mantissas around 1: the largest is as far from it as the least."""
        if not self.centered or not x.mantissa.numel():
            return x
        m = x.mantissa.detach()
        n = (find_middle(m) / self.order).round()
        exponent = torch.where((m == 0).all(), DEAD, x.exponent + n)
        return Scaled(self.shift(x.mantissa, -n), exponent)

    def align(self, values: Sequence[Scaled]) -> tuple[list[Tensor], Tensor]:
        """Mantissas of several values with one exponent: the largest."""
        if not self.centered:
            return [value.mantissa for value in values], values[0].exponent
        highest = functools.reduce(torch.maximum, [value.exponent for value in values])
        return [self.shift(v.mantissa, v.exponent - highest) for v in values], highest

    def reduce(self, x: Scaled, dims: Sequence[int]) -> Scaled:
        """The sum (or the maximum) over ``dims``, kept with size one."""
        if not dims:  # torch takes no axes for all axes
            return x
        reduce = torch.amax if math.isinf(self.p) else torch.sum
        return Scaled(reduce(x.mantissa, tuple(dims), keepdim=True), x.exponent)

    def add(self, values: Sequence[Scaled]) -> Scaled:
        """The sum (or the maximum) of several values of one shape."""
        if len(values) == 1:
            return values[0]
        parts, exponent = self.align(values)
        return self.center(
            Scaled(functools.reduce(torch.maximum if math.isinf(self.p) else torch.add, parts), exponent)
        )

    def cat(self, values: Sequence[Scaled], dim: int) -> Scaled:
        """Values joined along one axis."""
        parts, exponent = self.align(values)
        return self.center(Scaled(torch.cat(parts, dim), exponent))

    def multiply(self, x: Scaled, y: Scaled) -> Scaled:
        exponent = (x.exponent + y.exponent).clamp(min=DEAD) if self.centered else x.exponent
        return self.center(Scaled(x.mantissa * y.mantissa, exponent))

    def sum_to(self, x: Scaled, shape: Sequence[int]) -> Scaled:
        """The adjoint of broadcasting ``shape`` to the shape of ``x``."""
        extra = x.mantissa.dim() - len(shape)
        padded = (1,) * extra + tuple(shape)
        dims = [d for d, n in enumerate(padded) if n == 1 and x.mantissa.shape[d] != 1]
        x = self.reduce(x, dims)
        return Scaled(x.mantissa.reshape(tuple(shape)), x.exponent) if extra else x

    def ones(self, shape: Sequence[int], device: torch.device) -> Scaled:
        one = torch.ones((1,) * len(shape), dtype=torch.float64, device=device)
        return Scaled(one.expand(tuple(shape)), make_zero(device))

    def edges(self, w: Tensor, shape: Sequence[int]) -> Scaled:
        """``|w|^p`` as a value of the given shape, ``w`` broadcast."""
        w, exponent = self.divide_by_middle(w)
        powers = self.center(Scaled(self.power_in_double(w), exponent))
        return Scaled(powers.mantissa.expand(tuple(shape)), powers.exponent)

    def divide_by_middle(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Weights whose powers are within fp64, and the exponent they were divided by."""
        plain = w.dtype != torch.float64 and self.order <= MAX_PLAIN_P
        if plain or not self.centered or not w.numel():
            return w, make_zero(w.device)
        exponent = find_middle(w.detach().abs().double())
        return scale_by_power(w.double(), -exponent), exponent


def _multiply_up(x: Tensor, n: int) -> Tensor:
    """``x^n`` by few multiplications."""
    if n == 1:
        return x
    half = _multiply_up(x, n // 2)
    return half * half * x if n % 2 else half * half


def find_middle(x: Tensor) -> Tensor:
    """The exponent halfway between those of the least and the largest of numbers over 0; 0 if there is
    none."""
    largest, least = x.amax(), torch.where(x > 0, x, math.inf).amin()
    return ((largest.log2() + least.log2()) / 2).round().nan_to_num(0.0, 0.0, 0.0)


def apply_view(operation: Operation, x: Scaled) -> Scaled:
    """A view of path weights: units change places, numbers stay as they are."""
    return Scaled(view_tensor(operation, x.mantissa), x.exponent)
