"""Numbers that tables and claims are made of: means over repeats, spreads, epochs to a loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pathsgd.paper.experiment.record import Recorded


@dataclass(frozen=True)
class Spread:
    """A number over repeats; nan if any of them diverged."""

    mean: float
    least: float
    largest: float
    lost: str = "diverged"
    """What is said where there is no number."""

    def percent(self) -> str:
        if math.isnan(self.mean):
            return self.lost
        if self.least == self.largest:
            return f"{self.mean:.2%}"
        return f"{self.mean:.2%} ({100 * self.least:.2f} to {100 * self.largest:.2f})"

    def plain(self) -> str:
        return self.lost if math.isnan(self.mean) else f"{self.mean:.3g}"


def spread(values: Sequence[float]) -> Spread:
    lost = sum(map(math.isnan, values))
    if lost or not values:
        text = "none (no step size ended well)" if not values else f"{lost} of {len(values)} diverged"
        return Spread(math.nan, math.nan, math.nan, text if len(values) != 1 else "diverged")
    return Spread(statistics.fmean(values), min(values), max(values))


def last(runs: Sequence[Recorded], name: str) -> Spread:
    """After the last epoch."""
    return spread([run.curve(name)[-1] if run.status == "done" else math.nan for run in runs])


@dataclass(frozen=True)
class Gap:
    """Between two curves."""

    mean: float
    largest: float
    level: float
    """The mean of the first curve."""


def gaps(own: Sequence[Recorded], other: Sequence[Recorded], name: str) -> list[Gap]:
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
            found.append(Gap(statistics.fmean(apart), max(apart), level))
    return found


def alike(own: Sequence[Recorded], other: Sequence[Recorded]) -> bool:
    """Whether as many repeats ended in the same way after as many epochs; not if there are none."""
    ends = [[(run.status, run.epochs) for run in runs] for runs in (own, other)]
    return bool(own) and ends[0] == ends[1]


def mean_curve(runs: Sequence[Recorded], name: str) -> list[float]:
    """Epoch by epoch, as far as all of them went."""
    curves = [run.curve(name) for run in runs]
    return [statistics.fmean(values) for values in zip(*curves, strict=False)]


@dataclass(frozen=True)
class Race:
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


def race(own: Sequence[Recorded], other: Sequence[Recorded]) -> Race | None:
    """None if one of them diverged, or there is none."""
    if not own or not other or any(run.status != "done" for run in (*own, *other)):
        return None
    first, second = (mean_curve(runs, "train_loss")[1:] for runs in (own, other))
    target = max(min(first), min(second))
    own_epoch, other_epoch = (
        next(k for k, loss in enumerate(curve, 1) if loss <= target) for curve in (first, second)
    )
    ahead = sum(a < b for a, b in zip(first, second, strict=True))
    return Race(target, own_epoch, other_epoch, ahead, len(first))
