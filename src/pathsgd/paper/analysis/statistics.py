"""Statistics of recorded runs: means over repeats, gaps between curves, epochs to a loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pathsgd.paper.records.run_folder import RunRecord


@dataclass(frozen=True)
class MeanAndRange:
    """A number over repeats; nan if one of them diverged."""

    mean: float
    least: float
    largest: float
    missing: str = "diverged"
    """Printed where there is no number."""

    def percent(self) -> str:
        if math.isnan(self.mean):
            return self.missing
        if self.least == self.largest:
            return f"{self.mean:.2%}"
        return f"{self.mean:.2%} ({100 * self.least:.2f} to {100 * self.largest:.2f})"

    def plain(self) -> str:
        return self.missing if math.isnan(self.mean) else f"{self.mean:.3g}"


def summarize(values: Sequence[float]) -> MeanAndRange:
    diverged = sum(map(math.isnan, values))
    if diverged or not values:
        text = "none (no step size ended well)" if not values else f"{diverged} of {len(values)} diverged"
        return MeanAndRange(math.nan, math.nan, math.nan, text if len(values) != 1 else "diverged")
    return MeanAndRange(statistics.fmean(values), min(values), max(values))


def summarize_last(runs: Sequence[RunRecord], name: str) -> MeanAndRange:
    """After the last epoch."""
    return summarize([run.curve(name)[-1] if run.status == "done" else math.nan for run in runs])


@dataclass(frozen=True)
class CurveGap:
    """The distance between two curves."""

    mean: float
    largest: float
    level: float
    """The mean of the first curve."""


def measure_gaps(own: Sequence[RunRecord], other: Sequence[RunRecord], name: str) -> list[CurveGap]:
    """Repeat by repeat, over the epochs after which both have a number."""
    found = []
    for x, y in zip(own, other, strict=False):
        pairs = [
            (a, b)
            for a, b in zip(x.curve(name)[1:], y.curve(name)[1:], strict=False)
            if math.isfinite(a) and math.isfinite(b)
        ]
        if pairs:
            apart = [abs(a - b) for a, b in pairs]
            level = statistics.fmean(a for a, _ in pairs)
            found.append(CurveGap(statistics.fmean(apart), max(apart), level))
    return found


def end_alike(own: Sequence[RunRecord], other: Sequence[RunRecord]) -> bool:
    """Whether there are repeats, and all end in the same way after as many epochs as in the other."""
    ends = [[(run.status, run.epochs) for run in runs] for runs in (own, other)]
    return bool(own) and ends[0] == ends[1]


def mean_curve(runs: Sequence[RunRecord], name: str) -> list[float]:
    """Epoch by epoch, as far as all of them went."""
    curves = [run.curve(name) for run in runs]
    return [statistics.fmean(values) for values in zip(*curves, strict=False)]


@dataclass(frozen=True)
class LossRace:
    """Which of two reaches a training loss first: the lowest that both reach."""

    target: float
    own: int
    other: int
    """Epochs."""
    ahead: int
    """Epochs after which the first has the lower loss."""
    of: int

    def __str__(self) -> str:
        return (
            f"to {self.target:.3g} in {self.own} against {self.other}, lower after {self.ahead} of {self.of}"
        )


def race_to_loss(own: Sequence[RunRecord], other: Sequence[RunRecord]) -> LossRace | None:
    """None if one of them diverged, or there is none."""
    if not own or not other or any(run.status != "done" for run in (*own, *other)):
        return None
    first, second = (mean_curve(runs, "train_loss")[1:] for runs in (own, other))
    target = max(min(first), min(second))
    own_epoch, other_epoch = (
        next(k for k, loss in enumerate(curve, 1) if loss <= target) for curve in (first, second)
    )
    ahead = sum(a < b for a, b in zip(first, second, strict=True))
    return LossRace(target, own_epoch, other_epoch, ahead, len(first))
