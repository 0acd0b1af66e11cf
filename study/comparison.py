"""Comparisons behind a claim: an effect in every seed, its confidence interval, and what the paper says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from study.config import Cell
from study.runs import RunRecord

Verdict = Literal["agrees", "disagrees", "cannot be told", "not tested"]
Pair = tuple[RunRecord | None, RunRecord | None]
"""Two runs of one seed; None where no step size ended well."""
LAST_EPOCHS = 5
"""Epochs at the end of a run whose mean is its final error or loss: one epoch alone wobbles."""
CONFIDENCE = 0.95
NOT_COUNTED = "not part of the claim"
ALMOST_ZERO = 1e-12
"""Errors and losses below it count as this in ratios."""


def mean_of_last(run: RunRecord, name: str) -> float:
    return statistics.fmean(run.curve(name)[1:][-LAST_EPOCHS:])


def find_common_loss(runs: Sequence[RunRecord]) -> float:
    """Lowest training loss that all of these runs reach."""
    return max(min(run.curve("train_loss")[1:]) for run in runs)


def count_epochs_to(loss: float, run: RunRecord) -> int | None:
    """Epochs that a run takes to a training loss; None if it does not reach it."""
    losses = enumerate(run.curve("train_loss"))
    return next((epoch for epoch, reached in losses if epoch and reached <= loss), None)


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float

    def halved(self) -> Interval:
        """Interval half as wide around the same mean."""
        return Interval(self.mean, (self.mean + self.low) / 2, (self.mean + self.high) / 2)


def confidence_interval(values: Sequence[float]) -> Interval | None:
    """Interval of the mean, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    width = find_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - width, mean + width)


def find_t(freedom: int) -> float:
    """Returns the t that Student's distribution exceeds, in absolute value, with a probability of 5%.

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


@dataclass(frozen=True)
class Comparison:
    """A row of the table of all comparisons."""

    where: str
    measured: str
    """The mean effect with its 95% confidence interval over the seeds."""
    by_seed: str
    agrees_if: str
    verdict: Verdict
    note: str = ""
    counts: bool = True
    """Whether it counts for the claim."""
    undecided: list[Cell] = field(default_factory=list)
    """The cells of which more seeds may decide it."""


@dataclass(frozen=True)
class Effect:
    """Difference between the first run of a pair and the second, seed by seed."""

    name: str
    names: tuple[str, str]
    """Names of the first and the second run."""
    by_seed: list[float]
    """The logarithm of a ratio, or a difference of errors: inf where the first of a pair diverged, -inf where
    the second did, nan where both did."""
    above: float = -math.inf
    """The paper says that the effect is above this and below the next."""
    below: float = math.inf
    ratio: bool = True

    @property
    def interval(self) -> Interval | None:
        """None for fewer than two seeds that count, or where only some of them have diverged."""
        counted = [d for d in self.by_seed if not math.isnan(d)]
        if not any(map(math.isinf, counted)):
            return confidence_interval(counted)
        alike = len(counted) > 1 and len(set(counted)) == 1
        return Interval(counted[0], counted[0], counted[0]) if alike else None

    @property
    def verdict(self) -> Verdict:
        return self._judge(self.interval)

    @property
    def is_close(self) -> bool:
        """Whether an interval half as wide would decide what this one does not."""
        interval = self.interval
        return interval is not None and self.verdict == "cannot be told" != self._judge(interval.halved())

    def _judge(self, interval: Interval | None) -> Verdict:
        if interval is None:
            return "cannot be told"
        if interval.high < self.above or interval.low > self.below:
            return "disagrees"
        inside = interval.low > self.above or self.above == -math.inf
        inside = inside and (interval.high < self.below or self.below == math.inf)
        return "agrees" if inside else "cannot be told"

    def describe(self) -> str:
        """Mean with its interval, or why there is none."""
        counted = [d for d in self.by_seed if not math.isnan(d)]
        lost = [(name, counted.count(d)) for name, d in zip(self.names, (math.inf, -math.inf), strict=True)]
        if any(count for _, count in lost):
            who = " and ".join(f"{name} diverged in {count}" for name, count in lost if count)
            return f"{who} of {len(self.by_seed)} seed{'s' * (len(self.by_seed) > 1)}"
        if not counted:
            return "both diverged in every seed"
        if self.interval is None:
            return f"{self.name} {self._format(counted[0])}, one seed: no interval"
        mean, low, high = map(self._format, (self.interval.mean, self.interval.low, self.interval.high))
        return f"{self.name} {mean} ({low} to {high})"

    def describe_seeds(self) -> str:
        return ", ".join(map(self._format, self.by_seed))

    def describe_bounds(self) -> str:
        low, high = self._format(self.above), self._format(self.below)
        if math.isfinite(self.above) and math.isfinite(self.below):
            return f"from {low} to {high}"
        return f"below {high}" if math.isfinite(self.below) else f"above {low}"

    def _format(self, d: float) -> str:
        if math.isnan(d):
            return "both diverged"
        if math.isinf(d):
            return f"{self.names[d < 0]} diverged"
        return f"{math.exp(min(d, 700.0)):.3g}" if self.ratio else f"{100 * d:.2f}".replace("-0.00", "0.00")


def measure(pairs: Sequence[Pair], effect: Callable[[RunRecord, RunRecord], float]) -> list[float]:
    """Measures the effect in each pair; a run that diverged has lost."""

    def measure_pair(pair: Pair) -> float:
        done = [run for run in pair if run is not None and run.status == "done"]
        if len(done) == 2:
            return effect(*done)
        if not done:
            return math.nan
        return -math.inf if done[0] is pair[0] else math.inf

    return list(map(measure_pair, pairs))


def log_ratio(first: float, second: float) -> float:
    """Logarithm of first / second, which may be zero."""
    return math.log(max(first, ALMOST_ZERO) / max(second, ALMOST_ZERO))


def compare(where: str, cells: Sequence[Cell], *effects: Effect, counts: bool = True) -> Comparison:
    """Agrees if one of the effects does, and disagrees if all of them do."""
    verdicts = {effect.verdict for effect in effects}
    verdict: Verdict = "agrees" if "agrees" in verdicts else "cannot be told"
    if verdicts == {"disagrees"}:
        verdict = "disagrees"
    close = verdict == "cannot be told" and any(effect.is_close for effect in effects)
    notes = [NOT_COUNTED] * (not counts) + ["more seeds may tell"] * close
    measured = dict.fromkeys(effect.describe() for effect in effects)  # who diverged is said once
    seeds = dict.fromkeys(effect.describe_seeds() for effect in effects)
    bounds = [f"{effect.name} {effect.describe_bounds()}" for effect in effects]
    agrees_if = " or ".join(bounds) if len(effects) > 1 else effects[0].describe_bounds()
    return Comparison(
        where, "; ".join(measured), "; ".join(seeds), agrees_if, verdict, ", ".join(notes), counts,
        list(cells) if close else [],
    )  # fmt: skip


def state(where: str, measured: str, agrees_if: str, holds: bool, counts: bool = True) -> Comparison:
    """Compares a fact without seeds."""
    verdict: Verdict = "agrees" if holds else "disagrees"
    return Comparison(where, measured, "", agrees_if, verdict, "" if counts else NOT_COUNTED, counts)
