"""One comparison behind a claim: an effect in every seed, its interval, and what the paper says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pathsgd.paper.analysis.statistics import Interval, confidence_interval
from pathsgd.paper.config import Cell
from pathsgd.paper.records.run_folder import RunRecord

Verdict = Literal["agrees", "disagrees", "cannot be told", "not tested"]
Pair = tuple[RunRecord | None, RunRecord | None]
"""Two runs of one seed; None where no step size ended well."""
NOT_COUNTED = "not part of the claim"
ALMOST_ZERO = 1e-12
"""Errors and losses below it count as this in ratios."""


@dataclass(frozen=True)
class Comparison:
    """A row of the table of all comparisons.

    Attributes:
        where: Data set, dropout and what is compared.
        measured: The mean effect with its 95% confidence interval over the seeds.
        by_seed: The effect in each seed.
        agrees_if: What the paper says of it.
        verdict: ``agrees``, ``disagrees`` or ``cannot be told``.
        note: Why it does not count for the claim, or that more seeds may decide it.
        counts: Whether it counts for the claim.
        undecided: The cells of which more seeds may decide it.
    """

    where: str
    measured: str
    by_seed: str
    agrees_if: str
    verdict: Verdict
    note: str = ""
    counts: bool = True
    undecided: list[Cell] = field(default_factory=list)


@dataclass(frozen=True)
class Effect:
    """How the first run of a pair differs from the second, seed by seed.

    Args:
        name: What is measured.
        names: Of the first and the second run.
        by_seed: The logarithm of a ratio, or a difference of errors: inf where the first of a pair diverged,
            -inf where the second did, nan where both did.
        above: The paper says that the effect is above this,
        below: and below this.
        ratio: Whether it is the logarithm of a ratio.
    """

    name: str
    names: tuple[str, str]
    by_seed: list[float]
    above: float = -math.inf
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
        found = self.interval
        return found is not None and self.verdict == "cannot be told" != self._judge(found.halved())

    def _judge(self, found: Interval | None) -> Verdict:
        if found is None:
            return "cannot be told"
        if found.high < self.above or found.low > self.below:
            return "disagrees"
        inside = found.low > self.above or self.above == -math.inf
        inside = inside and (found.high < self.below or self.below == math.inf)
        return "agrees" if inside else "cannot be told"

    def describe(self) -> str:
        """The mean with its interval, or why there is none."""
        counted = [d for d in self.by_seed if not math.isnan(d)]
        lost = [(name, counted.count(d)) for name, d in zip(self.names, (math.inf, -math.inf), strict=True)]
        if any(count for _, count in lost):
            who = " and ".join(f"{name} diverged in {count}" for name, count in lost if count)
            return f"{who} of {len(self.by_seed)} seed{'s' * (len(self.by_seed) > 1)}"
        if not counted:
            return "both diverged in every seed"
        found = self.interval
        if found is None:
            return f"{self.name} {self._format(counted[0])}, one seed: no interval"
        mean, low, high = map(self._format, (found.mean, found.low, found.high))
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
    """The effect in each pair; a run that diverged has lost."""
    return [_measure_pair(first, second, effect) for first, second in pairs]


def _measure_pair(
    first: RunRecord | None, second: RunRecord | None, effect: Callable[[RunRecord, RunRecord], float]
) -> float:
    done = [run for run in (first, second) if run is not None and run.status == "done"]
    if len(done) == 2:
        return effect(*done)
    if not done:
        return math.nan
    return -math.inf if done[0] is first else math.inf


def log_ratio(first: float, second: float) -> float:
    """The logarithm of first / second, which may be zero."""
    return math.log(max(first, ALMOST_ZERO) / max(second, ALMOST_ZERO))


def compare(where: str, cells: Sequence[Cell], *effects: Effect, counts: bool = True) -> Comparison:
    """Agrees if one of the effects does, and disagrees if all of them do."""
    found = {effect.verdict for effect in effects}
    verdict: Verdict = "agrees" if "agrees" in found else "cannot be told"
    if found == {"disagrees"}:
        verdict = "disagrees"
    close = verdict == "cannot be told" and any(effect.is_close for effect in effects)
    notes = [NOT_COUNTED] * (not counts) + ["more seeds may tell"] * close
    measured = dict.fromkeys(effect.describe() for effect in effects)  # who diverged is said once
    seeds = dict.fromkeys(effect.describe_seeds() for effect in effects)
    bounds = [effect.describe_bounds() for effect in effects]
    if len(effects) > 1:
        bounds = [f"{effect.name} {bound}" for effect, bound in zip(effects, bounds, strict=True)]
    agrees_if = " or ".join(bounds)
    undecided = list(cells) if close else []
    return Comparison(
        where, "; ".join(measured), "; ".join(seeds), agrees_if, verdict, ", ".join(notes), counts, undecided
    )


def state(where: str, measured: str, agrees_if: str, holds: bool, counts: bool = True) -> Comparison:
    """A fact without seeds."""
    verdict: Verdict = "agrees" if holds else "disagrees"
    return Comparison(where, measured, "", agrees_if, verdict, "" if counts else NOT_COUNTED, counts)
