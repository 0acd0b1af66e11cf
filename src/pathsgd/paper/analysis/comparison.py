"""Path-SGD compared with its rivals, all from a balanced start: which is faster, which ends lower."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pathsgd.paper.analysis.statistics import LossRace, MeanAndRange, race_to_loss, summarize_last
from pathsgd.paper.config import Cell
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.records.study_results import StudyResults

PATH, RIVALS = "path-sgd", ("sgd", "adagrad")


@dataclass(frozen=True)
class RivalComparison:
    """Path-SGD and its rivals on one data set, balanced."""

    races: dict[str, LossRace | None]
    """With each rival; None if one of the two diverged, or has no step size that ended well."""
    errors: dict[str, MeanAndRange]
    noise: float
    """How far the test errors of Path-SGD and of its rescaled copy end apart, which is rounding alone."""

    @property
    def ended(self) -> bool:
        return not math.isnan(self.errors[PATH].mean)

    @property
    def is_faster(self) -> bool:
        return self.ended and all(race is None or race.own < race.other for race in self.races.values())

    @property
    def is_better(self) -> bool:
        own = self.errors[PATH].mean
        return self.ended and not any(self.errors[name].mean <= own for name in RIVALS)

    def describe_epochs(self) -> str:
        parts = []
        for name, race in self.races.items():
            loser = name if self.ended else PATH
            missing = f"{METHODS[loser].label} {self.errors[loser].missing}"
            parts.append(f"{METHODS[name].label}: {race or missing}")
        return "epochs to the lowest training loss both reach: " + "; ".join(parts)

    def describe_errors(self) -> str:
        own = self.errors[PATH]
        text = "test error " + ", ".join(f"{METHODS[n].label} {e.percent()}" for n, e in self.errors.items())
        close = [
            METHODS[n].label
            for n in RIVALS
            if self.errors[n].least <= own.largest and own.least <= self.errors[n].largest
        ]
        if close and any(error.least < error.largest for error in self.errors.values()):
            text += f"; the seeds' ranges overlap with {' and '.join(close)}"
        near = [METHODS[n].label for n in RIVALS if abs(self.errors[n].mean - own.mean) <= self.noise]
        if near:
            text += (
                f"; no farther from {' and '.join(near)} than Path-SGD from its own unbalanced start, "
                f"{100 * self.noise:.2f} points"
            )
        return text


def compare_with_rivals(results: StudyResults, dropout: float) -> dict[str, RivalComparison]:
    """For each data set with all three methods."""
    found = {}
    for dataset in results.study.datasets:
        cells = {name: Cell(dataset, dropout, "balanced", name) for name in (PATH, *RIVALS)}
        if all(cell in results.finals for cell in cells.values()):
            runs = {name: results.finals[cell] for name, cell in cells.items()}
            errors = {name: summarize_last(own, "test_error") for name, own in runs.items()}
            unbalanced = results.finals.get(Cell(dataset, dropout, "unbalanced", PATH), [])
            twin = summarize_last(unbalanced, "test_error")
            races = {name: race_to_loss(runs[PATH], runs[name]) for name in RIVALS}
            found[dataset] = RivalComparison(races, errors, abs(errors[PATH].mean - twin.mean))
    return found
