"""Ranking of methods in a study from one start: fastest to a training loss, lowest at the end.

The rule is in docs/reproduction.md, under "The outlook".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from study.comparison import Effect, count_epochs_to, find_common_loss, log_ratio, mean_of_last, measure
from study.config import Cell
from study.results import StudyResults
from study.runs import RunRecord

LEARNED = 0.5
"""Fraction of its training loss before the first step: a run that does not end below it failed."""
Runs = Mapping[str, Sequence[RunRecord | None]]
"""Runs of each method, seed by seed; None for a run that failed."""


@dataclass(frozen=True)
class Ranking:
    """Methods by one number, of which less is better."""

    name: str
    first: str | None
    """The method with the lowest mean of those of which no seed failed."""
    behind: dict[str, Effect]
    """How far every other method is behind it."""

    @property
    def undecided(self) -> list[str]:
        """Methods that cannot be told from the first."""
        return [method for method, effect in self.behind.items() if effect.verdict != "agrees"]

    def describe(self, method: str) -> str:
        """Says how far a method is behind the first, and whether that can be told."""
        if method not in self.behind:
            return "first" if method == self.first else ""
        effect = self.behind[method]
        failed = effect.by_seed.count(math.inf)
        said = f"failed in {failed} of {len(effect.by_seed)} seeds" if failed else effect.describe().strip()
        return f"cannot be told: {said}" if method in self.undecided else said


@dataclass(frozen=True)
class Standings:
    """The methods on one data set."""

    dataset: str
    dropout: float
    epochs: dict[str, list[int | None]]
    """Epochs of each method to the loss that is raced to, seed by seed; None for a run that failed."""
    rankings: list[Ranking]
    """By epochs to a training loss, by the final training loss, by the final test error."""


def rank_methods(results: StudyResults) -> list[Standings]:
    """Ranks the methods of a study from one start, for each data set and dropout."""
    study = results.study
    (init,), standings = study.inits, []
    for dataset, dropout in itertools.product(study.datasets, study.dropouts):
        finals = {name: results.finals[Cell(dataset, dropout, init, name)] for name in study.methods}
        runs = {
            name: [run if _has_learned(run) else None for run in records] or [None] * study.repeats
            for name, records in finals.items()
        }
        standings.append(_compare_all(dataset, dropout, runs))
    return standings


def _compare_all(dataset: str, dropout: float, runs: Runs) -> Standings:
    learned = [run for records in runs.values() for run in records if run is not None]
    loss = find_common_loss(learned) if learned else 0.0
    epochs = {
        name: [None if run is None else count_epochs_to(loss, run) for run in records]
        for name, records in runs.items()
    }
    rankings = [
        _rank(f"epochs to a training loss of {loss:.2g}", runs, lambda run: count_epochs_to(loss, run) or 0),
        _rank("final training loss", runs, lambda run: mean_of_last(run, "train_loss")),
        _rank("final test error", runs, lambda run: mean_of_last(run, "test_error"), ratio=False),
    ]
    return Standings(dataset, dropout, epochs, rankings)


def _has_learned(run: RunRecord) -> bool:
    before = run.curve("train_loss")[0]
    return run.status == "done" and mean_of_last(run, "train_loss") < LEARNED * before


def _rank(name: str, runs: Runs, number: Callable[[RunRecord], float], ratio: bool = True) -> Ranking:
    def score(run: RunRecord) -> float:
        return log_ratio(number(run), 1.0) if ratio else number(run)

    whole = {method: [run for run in records if run is not None] for method, records in runs.items()}
    whole = {method: records for method, records in whole.items() if len(records) == len(runs[method])}
    first = min(whole, key=lambda method: fmean(map(score, whole[method])), default=None)
    behind = {}
    for method, records in runs.items():
        if first is not None and method != first:
            pairs = list(zip(records, whole[first], strict=True))
            by_seed = measure(pairs, lambda a, b: score(a) - score(b))
            behind[method] = Effect("", ("it", "the first"), by_seed, above=0.0, ratio=ratio)
    return Ranking(name, first, behind)
