"""Numbers that tables and claims are made of: means over repeats, spreads, epochs to a loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pathsgd.paper.experiment.config import Init
from pathsgd.paper.experiment.record import Recorded
from pathsgd.paper.experiment.results import Results
from pathsgd.paper.experiment.study import Cell


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
        text = "no step size ended well" if not values else f"{lost} of {len(values)} diverged"
        return Spread(math.nan, math.nan, math.nan, text if len(values) != 1 else "diverged")
    return Spread(statistics.fmean(values), min(values), max(values))


def last(runs: Sequence[Recorded], name: str) -> Spread:
    """After the last epoch."""
    return spread([run.curve(name)[-1] if run.status == "done" else math.nan for run in runs])


def late(runs: Sequence[Recorded], name: str) -> Spread:
    """The mean over the last third of the epochs: the test error of one run wobbles from epoch to epoch."""
    return spread(
        [
            statistics.fmean(run.curve(name)[-math.ceil(run.run.epochs / 3) :])
            if run.status == "done"
            else math.nan
            for run in runs
        ]
    )


def mean_curve(runs: Sequence[Recorded], name: str) -> list[float]:
    """Epoch by epoch, as far as all of them went."""
    curves = [run.curve(name) for run in runs]
    return [statistics.fmean(values) for values in zip(*curves, strict=False)]


def epochs_to(curve: Sequence[float], target: float) -> int | None:
    """The first epoch after which a curve is at or below a target."""
    return next((k for k, value in enumerate(curve) if k and value <= target), None)


def finals(
    results: Results, dataset: str, dropout: float, init: Init, methods: Sequence[str]
) -> dict[str, list[Recorded]]:
    """The final runs of each method that has any."""
    found = {name: results.finals.get(Cell(dataset, dropout, init, name), []) for name in methods}
    return {name: runs for name, runs in found.items() if runs}


@dataclass(frozen=True)
class Race:
    """Which method reaches a training loss first: the lowest that all of them reach."""

    target: float
    epochs: dict[str, int]


def race(runs: dict[str, list[Recorded]]) -> Race | None:
    """None if one of them diverged."""
    curves = {name: mean_curve(own, "train_loss") for name, own in runs.items()}
    ended = all(run.status == "done" for own in runs.values() for run in own)
    if not curves or not ended:
        return None
    target = max(min(curve[1:]) for curve in curves.values())
    epochs = {name: epochs_to(curve, target) for name, curve in curves.items()}
    return Race(target, {name: epoch for name, epoch in epochs.items() if epoch is not None})
