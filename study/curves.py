"""Curves of recorded runs: means and bands over repeats, where runs diverged, which range is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from study.runs import RunRecord

Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """Repeats of one cell, one number per epoch."""

    mean: list[float]
    """Up to the last epoch of the shortest repeat: a mean over fewer repeats would jump there."""
    low: list[float]
    high: list[float]
    rest: list[tuple[int, list[float]]]
    """For each longer repeat the epoch from which it goes on alone, and its values."""
    ends: list[Point]
    """Where repeats diverged."""

    @property
    def last(self) -> float:
        """Last value: the mean of all repeats that got there."""
        tails = [values[-1] for _, values in self.rest]
        return sum(tails) / len(tails) if tails else self.mean[-1] if self.mean else math.nan

    def values(self, first: int) -> list[float]:
        """Everything drawn as a line, from an epoch on; where it ends if it ends before."""
        tails = [v for start, values in self.rest for v in values[max(first - start, 0) :]]
        return self.mean[first:] + tails or self.mean[-1:]


def curve_of(runs: Sequence[RunRecord], name: str, last: int) -> Curve:
    """Curve of one of the recorded numbers over the epochs 0 to ``last``."""
    series = [_usable(run, name)[: last + 1] for run in runs]
    common = min(map(len, series), default=0)
    together = [[values[k] for values in series] for k in range(common)]
    pairs = list(zip(runs, series, strict=True))
    return Curve(
        mean=[sum(values) / len(values) for values in together],
        low=[min(values) for values in together],
        high=[max(values) for values in together],
        # One epoch earlier, so that the line goes on from where its repeats were last together.
        rest=[
            (max(common - 1, 0), values[max(common - 1, 0) :]) for values in series if len(values) > common
        ],
        ends=[
            (len(values) - 1, values[-1])
            for run, values in pairs
            if run.status == "diverged" and values and len(values) <= last
        ],
    )


def _usable(run: RunRecord, name: str) -> list[float]:
    """Values up to the epoch in which a run diverged, whose errors are those of a network of nans."""
    values = run.curve(name)
    return list(takewhile(math.isfinite, values[:-1] if run.status == "diverged" else values))


@dataclass(frozen=True)
class AxisRange:
    """The range of a vertical axis."""

    low: float
    high: float
    log: bool = False

    def leaves(self, values: Sequence[float]) -> str:
        """An arrow if a curve is out of range: up if all of it is too high; down if it ends below."""
        edge = self.high if self.log else self.low + 0.97 * (self.high - self.low)
        if values and all(value > edge for value in values):
            return "\u2191"
        return "\u2193" if values and values[-1] < self.low else ""


def settled(last: int) -> int:
    """The first epoch that counts for a range: the first errors are so high that they would fill it."""
    return min(max(2, round(0.06 * last)), last)


def loss_range(reference: Sequence[Curve]) -> AxisRange:
    """Range from the least loss to a little more than the first; logarithmic where that is far."""
    values = [v for curve in reference for v in curve.low + _tails(curve) if v > 0]
    if not values:
        return AxisRange(0.0, 1.0)
    low, first = min(values), max((curve.high[0] for curve in reference if curve.high), default=1.0)
    high = max(first, low)
    if high > 10 * low:
        return AxisRange(low / 1.5, high * 1.6, log=True)
    span = (high - low) or high
    return AxisRange(max(low - 0.06 * span, 0.0), high + 0.06 * span)


def error_range(reference: Sequence[Curve], others: Sequence[Curve], last: int) -> AxisRange:
    """Range of the errors of the reference curves once settled; others may double it, and no more."""
    first = settled(last)
    values = [v for curve in reference for v in _from(curve, first)]
    if not values:
        return AxisRange(0.0, 1.0)
    low, high = min(values), max(values)
    span = max(high - low, 0.005)
    most = max([v for c in others if (v := c.last) <= low + 2 * span] + [high])
    top = max(most, low + span)
    bottom = low - 0.07 * (top - low)
    # Room below zero, so that a curve on the axis is seen; no more than that.
    return AxisRange(max(bottom, -0.03 * top), top + 0.07 * (top - low))


def _from(curve: Curve, first: int) -> list[float]:
    return (curve.low[first:] + curve.high[first:] + _tails(curve)) or curve.mean[-1:]


def _tails(curve: Curve) -> list[float]:
    return [v for _, values in curve.rest for v in values[1:]]


def first_part(epochs: int) -> int:
    """About a third of the epochs, as a round number: what the paper's Figures 2 and 3 show.

    >>> [first_part(epochs) for epochs in (3, 12, 20, 30, 100, 400, 1000)]
    [3, 5, 5, 10, 30, 150, 300]
    """
    round_numbers = [5] + [b * 10**k for k in range(5) for b in (10, 15, 20, 25, 30, 40, 50, 60, 80)]
    return min(epochs, min(round_numbers, key=lambda n: (abs(n - epochs / 3), -n)))
