"""Numbers beyond floating-point range: a mantissa and an exact power-of-two exponent per unit.

A path weight of a deep or unbalanced network does not fit a float. ``ExtendedFloat(m, e)`` stands for
``m * 2^(p e)`` with ``e`` an integer that broadcasts against ``m`` (one per unit, not per position).
Exponents are folded into the weights *before* the power, so nothing is ever out of range; powers of two
are exact, so a network rescaled by powers of two is rounded alike. ``e is None`` means plain floats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pathsgd._torch import is_plain

DEAD = -(1 << 24)
"""The exponent of a zero: lower than any other, so that a dead unit never sets the exponent of a sum."""

LARGEST_MANTISSA = 2.0**20
"""Up to here mantissas leave room for sums and products."""


class ExtendedFloat(NamedTuple):
    """``mantissa * 2^(p * exponent)``."""

    mantissa: Tensor
    exponent: Tensor | None = None


def power_of_two(n: Tensor, dtype: torch.dtype) -> Tensor:
    """2^n exactly, from its bits; 0 where n is below the normal range (``torch.ldexp`` may round)."""
    if dtype == torch.float64:
        return ((n.clamp(-1023, 1023).to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((n.clamp(-127, 127).to(torch.int32) + 127) << 23).view(torch.float32)


def exact_ldexp(x: Tensor, n: Tensor) -> Tensor:
    """``x * 2^n`` exactly, in two halves because 2^n alone may be out of range where the product is not."""
    half = n >> 1
    return x * power_of_two(half, x.dtype) * power_of_two(n - half, x.dtype)


def exact_frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x = m * 2^e`` with |m| in [1/2, 1), and ``e = DEAD`` where x is zero."""
    zero = x == 0
    mantissa, exponent = torch.frexp(x.detach())
    if not is_plain(x):  # the derivative of torch.frexp overflows
        mantissa = exact_ldexp(x, -exponent)
    return mantissa, exponent.masked_fill(zero, DEAD)


def safe_range(dtype: torch.dtype) -> tuple[float, float, float]:
    """(smallest product, smallest sum, largest number) that plain floats are trusted with, if nothing else is
    known of the numbers.

    A term of a sum is known to within the smallest subnormal times the largest number; a sum over
    these bounds is so much larger that nothing is lost. A product only has to be a normal number.
    """
    if dtype == torch.float64:
        return 2.0**-1000, 2.0**-600, 2.0**400
    return 2.0**-120, 2.0**-60, 2.0**40


class Bounds(NamedTuple):
    """What plain floats are trusted with where the largest number is known; binary logarithms."""

    gamma: float
    """Of ``gamma_in gamma_out``, from above and, negative, from below: a normal number with bits to spare."""
    largest: float
    least_product: float
    term: float
    """A term of a sum is known to within the smallest subnormal times the largest number; a sum that is
    2^term times that number is so much larger that nothing is lost."""

    def least_sum(self, largest: float) -> float:
        """In steps, so that it seldom changes."""
        return self.term + 5 * max(2, math.ceil(largest / 5))


def safe_bounds(dtype: torch.dtype, order: float) -> Bounds:
    """The bounds of path weights of order p. ``(a b)^(1/p)`` of any two numbers is a normal number, too."""
    gamma, largest, term = (1000, 900, -1000) if dtype == torch.float64 else (120, 100, -100)
    most = gamma / 2 * order
    return Bounds(gamma, min(largest, most), -min(gamma, most), term)


def _largest_mantissas(x: ExtendedFloat) -> Tensor:
    """That of every unit."""
    assert x.exponent is not None
    mantissa = x.mantissa.detach()
    shared = [d for d, n in enumerate(x.exponent.shape) if n == 1 and mantissa.shape[d] > 1]
    return mantissa.amax(shared, keepdim=True) if shared else mantissa


@dataclass(frozen=True)
class Arithmetic:
    """The sums and products of the powered network for one ``p``.

    For ``p = inf`` every sum is a maximum and weights enter with power one.
    """

    p: float
    dtype: torch.dtype
    exponents: bool = False
    as_given: bool = False
    """Weights enter as they are: because they are powers already, or signed on purpose."""

    @property
    def order(self) -> float:
        """p, but 1 for ``p = inf``: what weights are raised to, and what one step of an exponent stands
        for."""
        return 1.0 if math.isinf(self.p) else self.p

    def cast(self, w: Tensor) -> Tensor:
        """``w`` in the dtype of path weights. ``Tensor.to`` takes as long as a product of small tensors to
        find that there is nothing to do."""
        return w if w.dtype == self.dtype else w.to(self.dtype)

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
        n = int(self.order)
        result = None
        base = w if n % 2 == 0 else w.abs()
        while n:
            if n % 2:
                result = base if result is None else result * base
            n //= 2
            base = base * base if n else base
        assert result is not None
        return result

    def root(self, x: Tensor, numerator: float = 1.0) -> Tensor:
        """``x^(numerator / p)``; for ``p = inf`` path weights carry power one already."""
        exponent = numerator / self.order
        if exponent == 1:
            return x
        if exponent == 2:
            return x * x
        if exponent < 1 and math.log2(exponent).is_integer():
            for _ in range(-int(math.log2(exponent))):
                x = x.sqrt()
            return x
        return x.pow(exponent)

    def shift(self, x: Tensor, n: Tensor) -> Tensor:
        """``x * 2^(p n)``."""
        if self.order == int(self.order):
            return exact_ldexp(x, n * int(self.order))
        factor = torch.exp2(n.to(x.dtype) * (self.order / 2))
        return x * factor * factor

    # Sums

    def reduce(self, x: ExtendedFloat, dims: Sequence[int]) -> ExtendedFloat:
        """The sum (or the maximum) over ``dims``, kept with size one."""
        if not dims:  # torch takes no axes for all axes
            return x
        mantissa, exponent = self.align(x, dims)
        if math.isinf(self.p):
            return self.keep_in_range(ExtendedFloat(mantissa.amax(tuple(dims), keepdim=True), exponent))
        # The copies along an expanded axis are counted, not added up.
        repeated = [d for d in dims if mantissa.shape[d] > 1 and mantissa.stride(d) == 0]
        times = math.prod(mantissa.shape[d] for d in repeated)
        for d in repeated:
            mantissa = mantissa.narrow(d, 0, 1)
        rest = tuple(d for d in dims if mantissa.shape[d] != 1)
        mantissa = mantissa.sum(rest, keepdim=True) if rest else mantissa
        return self.keep_in_range(ExtendedFloat(mantissa * times if times > 1 else mantissa, exponent))

    def add(self, values: Sequence[ExtendedFloat]) -> ExtendedFloat:
        """The sum (or the maximum) of several values of one shape."""
        if len(values) == 1:
            return values[0]
        parts = [v.mantissa for v in values]
        highest = values[0].exponent
        if highest is not None:
            for v in values[1:]:
                highest = torch.maximum(highest, v.exponent)  # type: ignore[arg-type]
            parts = [self.shift(v.mantissa, v.exponent - highest) for v in values]  # type: ignore[operator]
        result = functools.reduce(torch.maximum if math.isinf(self.p) else torch.add, parts)
        return self.keep_in_range(ExtendedFloat(result, highest))

    def multiply(self, x: ExtendedFloat, y: ExtendedFloat) -> ExtendedFloat:
        if x.exponent is None or y.exponent is None:
            return ExtendedFloat(x.mantissa * y.mantissa)
        exponent = (x.exponent + y.exponent).clamp(min=DEAD)
        return self.keep_in_range(ExtendedFloat(x.mantissa * y.mantissa, exponent))

    # Exponents

    def align(self, x: ExtendedFloat, dims: Sequence[int]) -> ExtendedFloat:
        """``x`` with one exponent along each of ``dims``: the largest."""
        if x.exponent is None or all(x.exponent.shape[d] == 1 for d in dims):
            return x
        highest = x.exponent.amax(tuple(dims), keepdim=True)
        return ExtendedFloat(self.shift(x.mantissa, x.exponent - highest), highest)

    def normalise(self, x: ExtendedFloat, lift: int = 0) -> ExtendedFloat:
        """The same numbers with the largest mantissa of each unit in [1, 2^p), times ``2^(p lift)``."""
        if x.exponent is None or not x.mantissa.numel():
            return x
        top = _largest_mantissas(x)
        binary = torch.frexp(top).exponent - 1
        if self.order == 2:
            steps = binary >> 1
        else:
            steps = torch.floor(binary / self.order).to(torch.int32)
        # One factor, a normal number: of mantissas near the ends of the range it leaves a few powers of two.
        most = int((1022 if self.dtype == torch.float64 else 126) / self.order)
        steps = (steps - lift if lift else steps).clamp(-most, most)
        if self.order == int(self.order):
            factor = power_of_two(steps * -int(self.order), self.dtype)
        else:
            factor = torch.exp2(steps.to(self.dtype) * -self.order)
        return ExtendedFloat(x.mantissa * factor, (x.exponent + steps).masked_fill(top == 0, DEAD))

    def keep_in_range(self, x: ExtendedFloat) -> ExtendedFloat:
        """:meth:`normalise`, unless that is deferred and the largest mantissa of each unit is from 1 to
        LARGEST_MANTISSA: to look takes a fifth of the time."""
        if not self._defers(x):
            return self.normalise(x)
        least, largest = torch.aminmax(_largest_mantissas(x))
        if least.item() >= 1 and largest.item() <= LARGEST_MANTISSA:
            return x
        return self.normalise(x, int(math.log2(LARGEST_MANTISSA) / 2 / self.order))

    def normalise_now(self, x: ExtendedFloat) -> ExtendedFloat:
        """Unless that is deferred."""
        return x if self._defers(x) else self.normalise(x)

    def normalise_deferred(self, x: ExtendedFloat) -> ExtendedFloat:
        """A result, of which rescaled copies have to be rounded alike, if that was deferred."""
        return self.normalise(x) if self._defers(x) else x

    def _defers(self, x: ExtendedFloat) -> bool:
        """Whether results alone are normalised: on a CPU, since elsewhere the host would wait to look at
        mantissas, and where powers of 2^p are exact."""
        on_cpu = x.exponent is not None and x.mantissa.device.type == "cpu" and x.mantissa.numel() > 0
        return on_cpu and self.order == int(self.order) and is_plain(x.mantissa)

    def ones(self, shape: Sequence[int], device: torch.device) -> ExtendedFloat:
        exponent = None
        if self.exponents:
            exponent = torch.zeros((1,) * len(shape), dtype=torch.int32, device=device)
        one = torch.ones((1,) * len(shape), dtype=self.dtype, device=device)
        return ExtendedFloat(one.expand(tuple(shape)), exponent)

    def edges(self, w: Tensor, shape: Sequence[int]) -> ExtendedFloat:
        """``|w|^p`` as a value of the given shape, ``w`` broadcast."""
        w = self.cast(w)
        if not self.exponents:
            return ExtendedFloat(self.power(w).expand(tuple(shape)))
        w = w.reshape((1,) * (len(shape) - w.dim()) + tuple(w.shape))
        mantissa, exponent = exact_frexp(w)
        return ExtendedFloat(self.power(mantissa).expand(tuple(shape)), exponent)
