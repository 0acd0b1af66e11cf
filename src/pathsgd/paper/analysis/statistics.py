"""Statistics of recorded runs: means over last epochs, confidence intervals over seeds, epochs to a loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pathsgd.paper.records.run_folder import RunRecord

LAST = 5
"""Epochs at the end of a run whose mean is its final error or loss: one epoch alone wobbles."""
CONFIDENCE = 0.95


def mean_of_last(run: RunRecord, name: str) -> float:
    """Over the last five epochs; fewer in a shorter run."""
    return statistics.fmean(run.curve(name)[1:][-LAST:])


def count_epochs(own: RunRecord, other: RunRecord) -> tuple[int, int]:
    """The epochs that each of two runs takes to the lowest training loss that both reach."""
    target = find_common_loss([own, other])
    first, second = count_epochs_to(target, own), count_epochs_to(target, other)
    assert first is not None
    assert second is not None
    return first, second


def find_common_loss(runs: Sequence[RunRecord]) -> float:
    """The lowest training loss that all of these runs reach."""
    return max(min(run.curve("train_loss")[1:]) for run in runs)


def count_epochs_to(loss: float, run: RunRecord) -> int | None:
    """The epochs that a run takes to a training loss; None if it does not reach it."""
    found = enumerate(run.curve("train_loss"))
    return next((epoch for epoch, own in found if epoch and own <= loss), None)


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float

    def halved(self) -> Interval:
        """Half as wide around the same mean."""
        return Interval(self.mean, (self.mean + self.low) / 2, (self.mean + self.high) / 2)


def confidence_interval(values: Sequence[float]) -> Interval | None:
    """Of the mean, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    width = find_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - width, mean + width)


def find_t(freedom: int) -> float:
    """The t that Student's distribution exceeds, in absolute value, with a probability of 5%.

    >>> round(find_t(2), 4)  # three seeds
    4.3027
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) tan(angle)): the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
