"""Path-SGD beside its rivals, all from a balanced start: who is faster, who ends lower, and by how little."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pathsgd.paper.config import Cell
from pathsgd.paper.evidence import Race, Spread, last, race
from pathsgd.paper.experiment.results import Results
from pathsgd.paper.optimizers import METHODS

PATH, RIVALS = "path-sgd", ("sgd", "adagrad")


@dataclass(frozen=True)
class Compared:
    """Path-SGD and its rivals on one data set, balanced."""

    races: dict[str, Race | None]
    """With each rival; None if one of the two diverged, or has no step size that ended well."""
    errors: dict[str, Spread]
    noise: float
    """How far Path-SGD ends from its own rescaled start, in test error: only rounding tells them apart."""

    @property
    def ended(self) -> bool:
        return not math.isnan(self.errors[PATH].mean)

    @property
    def faster(self) -> bool:
        return self.ended and all(race is None or race.own < race.other for race in self.races.values())

    @property
    def better(self) -> bool:
        own = self.errors[PATH].mean
        rivals = (self.errors[name].mean for name in RIVALS)
        return self.ended and all(math.isnan(error) or own < error for error in rivals)

    def said_of_epochs(self) -> str:
        return "epochs to the lowest training loss both reach: " + "; ".join(
            f"{METHODS[name].label}: {race or self._lost(name)}" for name, race in self.races.items()
        )

    def _lost(self, rival: str) -> str:
        loser = rival if self.ended else PATH
        return f"{METHODS[loser].label} {self.errors[loser].lost}"

    def said_of_errors(self) -> str:
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


def compared_on(results: Results, dropout: float) -> dict[str, Compared]:
    """For each data set with all three methods."""
    found = {}
    for dataset in results.study.datasets:
        cells = {name: Cell(dataset, dropout, "balanced", name) for name in (PATH, *RIVALS)}
        if all(cell in results.finals for cell in cells.values()):
            runs = {name: results.finals[cell] for name, cell in cells.items()}
            errors = {name: last(own, "test_error") for name, own in runs.items()}
            twin = last(results.finals.get(Cell(dataset, dropout, "unbalanced", PATH), []), "test_error")
            races = {name: race(runs[PATH], runs[name]) for name in RIVALS}
            found[dataset] = Compared(races, errors, abs(errors[PATH].mean - twin.mean))
    return found
