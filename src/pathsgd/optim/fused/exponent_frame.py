"""A power of two for each vector of gammas of a chain, so that deep chains stay within plain floats.

Path weights shrink or grow by a factor with every layer; across sixty layers that is more than a float holds,
though the numbers of any one vector are close to each other. ``gamma = carried * 2^(p * exponent)`` with one
exponent for a vector, chosen when gamma is measured. Powers of two are exact, so nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pathsgd.geometry.extended_float import DEAD, Arithmetic, ExtendedFloat, safe_range

LARGEST = 120
"""The largest exponent of a number that fp32 is trusted with."""
JUMP = 40
"""And of what one layer multiplies path weights by: its weights are squared, or worse, on the way."""


@dataclass(frozen=True)
class ExponentFrame:
    """The exponents of a chain: of gamma_in of each layer's inputs and of gamma_out of its outputs."""

    into: tuple[int, ...]
    out: tuple[int, ...]
    p: int

    def root_factor(self, k: int) -> float:
        """What the product of the carried inverse roots of layer k is multiplied by."""
        return 2.0 ** -(self.into[k] + self.out[k])

    def bias_root_factor(self, k: int) -> float:
        """The same for its bias, whose gamma_in is 1."""
        return 2.0 ** -self.out[k]

    def into_factor(self, k: int) -> float:
        """What layer k's sums over its inputs are multiplied by."""
        return 2.0 ** (self.p * (self.into[k] - self.into[k + 1]))

    def bias_factor(self, k: int) -> float:
        """What layer k's bias is multiplied by, before the power."""
        return 2.0 ** -self.into[k + 1]

    def out_factor(self, k: int) -> float:
        """What layer k's sums over its outputs are multiplied by."""
        return 2.0 ** (self.p * (self.out[k] - self.out[k - 1]))

    def fits(self, least: Sequence[float]) -> bool:
        """Whether all of these, and the squares of the inverse roots of each ``out``, are fp32 numbers.
        ``least`` is the least of each ``out`` as it is carried."""
        jumps = [self.p * (b - a) for side in (self.into, self.out) for a, b in pairwise(side)]
        squares = [
            2 * abs(n) - 2 / self.p * math.log2(low)
            for k, low in enumerate(least)
            for n in (self.into[k] + self.out[k], self.out[k])
        ]
        return all(abs(n) <= LARGEST for n in (*squares, *self.into)) and all(abs(n) <= JUMP for n in jumps)


def give_exponents(
    vectors: Sequence[ExtendedFloat], arithmetic: Arithmetic, dtype: torch.dtype
) -> list[ExtendedFloat]:
    """Plain gammas as they are if a chain that computes in ``dtype`` is trusted with them, else with
    exponents: a measurement looks closer and is trusted with more."""
    _, low, high = safe_range(dtype)
    numbers = torch.cat([vector.mantissa for vector in vectors])
    if not bool(((numbers > high) | ((numbers > 0) & (numbers < low))).any()):
        return list(vectors)
    zeros = [torch.zeros_like(vector.mantissa, dtype=torch.int32) for vector in vectors]
    return [
        arithmetic.normalise(ExtendedFloat(vector.mantissa, zero))
        for vector, zero in zip(vectors, zeros, strict=True)
    ]


def fit_frame(
    into: Sequence[ExtendedFloat], out: Sequence[ExtendedFloat], arithmetic: Arithmetic
) -> tuple[ExponentFrame, list[Tensor]] | None:
    """Exponents for these gammas, and the gammas as they are carried; None if no such exponents will do."""
    vectors = [*into, *out]
    exponents = [_highest(vector) for vector in vectors]
    carried = [
        vector.mantissa
        if vector.exponent is None
        else arithmetic.shift(vector.mantissa, (vector.exponent - highest).clamp(min=DEAD // 2))
        for vector, highest in zip(vectors, exponents, strict=True)
    ]
    count = len(into)
    frame = ExponentFrame(tuple(exponents[:count]), tuple(exponents[count:]), int(arithmetic.p))
    if any(vector.exponent is not None for vector in vectors):
        lost = (((x == 0) & (v.mantissa > 0)).any() for x, v in zip(carried, vectors, strict=True))
        least = [float(torch.where(x > 0, x, 1).min()) if x.numel() else 1.0 for x in carried[count:]]
        if any(map(bool, lost)) or not frame.fits(least):
            return None
    return frame, carried


def _highest(vector: ExtendedFloat) -> int:
    if vector.exponent is None or not vector.mantissa.numel():
        return 0
    alive = torch.where(vector.mantissa > 0, vector.exponent, -math.inf).max()
    return int(alive) if bool(alive > DEAD // 2) else 0
