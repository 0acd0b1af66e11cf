"""Choice of step sizes: the lowest validation error wins.

Only runs that went to their end can win. A run that diverged is recorded and loses. A run that was stopped
because it had learned nothing loses to a run that is clearly ahead; if none is, the stopped ones are resumed
before the winner is chosen. Where the largest step size wins, one ten times as large is tried and shown; it
is not used, since it is not of the paper's grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from study.config import Study
from study.files import write_json
from study.run_queue import RunQueue
from study.runs import Choice, DataInfo, RunRecord, Trial, is_edge

CLEARLY_AHEAD = 0.8
"""Fraction of the error of guessing: with a winner below it, stopped runs stay stopped. A run is stopped at
0.9; of 14 that were resumed on CIFAR-10 behind winners at 0.54 to 0.69, the best came to 0.89."""


def search_step_sizes(study: Study, infos: Mapping[str, DataInfo], queue: RunQueue) -> list[Choice]:
    """Trains the search runs of every cell, and writes and returns its choices."""
    runs_of = {cell: study.search_runs(cell, infos[cell.dataset].checksum) for cell in study.cells()}
    records = queue.train_all("search for step sizes", [run for runs in runs_of.values() for run in runs])
    resumed = {
        record.run: dataclasses.replace(record.run, grace=0)
        for cell, runs in runs_of.items()
        for record in find_resumable([records[run] for run in runs], infos[cell.dataset].classes)
    }
    if resumed:
        queue.progress.message(f"{len(resumed)} runs that were stopped are resumed: nothing is clearly ahead")
        records |= queue.train_all("stopped runs resumed", list(resumed.values()))
    tried = {cell: [records[resumed.get(run, run)] for run in runs] for cell, runs in runs_of.items()}
    winners = {cell: choose_winner(tried_records) for cell, tried_records in tried.items()}
    largest = max(study.step_sizes)
    beyond = {
        cell: dataclasses.replace(runs_of[cell][0], step_size=10 * largest)
        for cell, winner in winners.items()
        if winner is not None and is_edge(largest, study.step_sizes) and winner.run.step_size == largest
    }
    if beyond:
        records |= queue.train_all("a step size beyond the largest", list(beyond.values()))
    choices = []
    for cell, winner in winners.items():
        shown = _trial(records[beyond[cell]]) if cell in beyond else None
        size = winner.run.step_size if winner else None
        choices.append(Choice(cell, size, list(map(_trial, tried[cell])), shown))
        queue.progress.message(str(choices[-1]))
    write_json(queue.out / "choices.json", [dataclasses.asdict(choice) for choice in choices])
    return choices


def choose_winner(records: Sequence[RunRecord]) -> RunRecord | None:
    """Lowest error, of equals the one that reached it in fewer epochs; None if no run ended well."""
    done = [record for record in records if record.status == "done"]
    # Of equals in both the larger step: the result must not depend on the order of the list.
    return min(done, key=lambda record: (*record.best, -record.run.step_size), default=None)


def find_resumable(records: Sequence[RunRecord], classes: int) -> list[RunRecord]:
    """Runs that were stopped though no other is clearly ahead."""
    best = choose_winner(records)
    if best is not None and best.best[0] < CLEARLY_AHEAD * (1 - 1 / classes):
        return []
    return [record for record in records if record.status == "stopped"]


def _trial(record: RunRecord) -> Trial:
    error, epoch = record.best
    return Trial(record.run.step_size, record.status, error, epoch, record.reason, record.run.name)
