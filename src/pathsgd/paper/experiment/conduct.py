"""A study from wherever it stands to its end: search, choose, train on everything.

Every run is found by its configuration, so the same command goes on where an earlier one stopped.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

import torch

from pathsgd.errors import PathError
from pathsgd.paper.config import Run, Study
from pathsgd.paper.data.dataset import Dataset, short_name
from pathsgd.paper.experiment import store
from pathsgd.paper.experiment.choose import to_carry_on, winner
from pathsgd.paper.experiment.execute import Habits, execute, recorded
from pathsgd.paper.experiment.manifest import note
from pathsgd.paper.experiment.problem import Problems, check_fits, checksum
from pathsgd.paper.experiment.record import Folder, Line, Recorded
from pathsgd.paper.experiment.results import Choice, DataInfo, Results, Tried
from pathsgd.paper.experiment.training import architecture, traced

Datasets = dict[str, Dataset]


class Reporter(Protocol):
    """Whoever is told how far things are."""

    def phase(self, title: str, epochs: int) -> None:
        """What follows takes at most so many epochs."""

    def epoch(self, run: Run, line: Line) -> None: ...

    def ended(self, run: Recorded) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Place:
    """Where and how runs are executed."""

    out: Path
    device: torch.device
    lanes: int = 1
    """Runs at a time."""
    habits: Habits = dataclasses.field(default_factory=Habits)
    replace: bool = False
    """Whether this study may take the place of another in the same folder."""

    @property
    def runs(self) -> Path:
        return self.out / "runs"


def conduct(study: Study, datasets: Datasets, place: Place, reporter: Reporter) -> Results:
    """Everything a study asks for, recorded in ``place.out``."""
    infos = record_head(study, datasets, place)
    choices = search(study, datasets, infos, place, reporter)
    finals = [
        run for choice in choices for run in final_runs(study, choice, infos[choice.cell.dataset].checksum)
    ]
    _execute_all("final runs", finals, datasets, place, reporter)
    return Results.load(place.out)


def record_head(study: Study, datasets: Datasets, place: Place) -> dict[str, DataInfo]:
    """Writes down what is about to be done, with what, if it can be done."""
    for run in study.all_search_runs():
        check_fits(datasets[run.dataset], run)
    with torch.device("meta"):
        for data in datasets.values():
            architecture(study.net, data.shape, study.hidden, data.classes)
    infos = {name: info_of(data) for name, data in datasets.items()}
    head = {
        "study.json": dataclasses.asdict(study),
        "data.json": {name: dataclasses.asdict(info) for name, info in infos.items()},
    }
    differing = [what for name, content in head.items() for what in _differing(place.out / name, content)]
    if differing:
        if not place.replace:
            raise PathError(
                f"{place.out} holds another study ({', '.join(differing)} differ): choose another folder "
                "(--out), or --replace it: its runs stay, and those in common are not run again"
            )
        # What another study came to must not be taken for what this one will.
        stale = ["choices.json", "claims.json", "cost.json", "report.html"]
        runs = [run for c in study.cells() for run in study.search_runs(c, infos[c.dataset].checksum)]
        if all(Folder(place.runs, run).recorded() is None for run in runs):
            stale.append("manifest.json")
        for name in stale:
            (place.out / name).unlink(missing_ok=True)
    for name, content in head.items():
        store.write_json(place.out / name, content)
    return infos


def _differing(path: Path, content: dict[str, object]) -> list[str]:
    """The entries in which a file is not this."""
    if not path.exists() or path.read_bytes() == store.encoded(content):
        return []
    try:
        found = store.read_json(path)
    except PathError:
        found = None
    if not isinstance(found, dict):
        return [path.name]
    now = json.loads(store.encoded(content))
    names = [name for name in {**found, **now} if found.get(name) != now.get(name)]
    return [f"data of {short_name(name)}" if path.name == "data.json" else name for name in names]


def info_of(data: Dataset) -> DataInfo:
    return DataInfo(checksum(data), data.shape, data.classes, len(data.train_y), len(data.test_y))


def search(
    study: Study, datasets: Datasets, infos: dict[str, DataInfo], place: Place, reporter: Reporter
) -> list[Choice]:
    """A step size for every cell."""
    of = {cell: study.search_runs(cell, infos[cell.dataset].checksum) for cell in study.cells()}
    runs = [run for own in of.values() for run in own]
    found = _execute_all("search for step sizes", runs, datasets, place, reporter)
    again = {
        cell: [
            dataclasses.replace(r.run, grace=0)
            for r in to_carry_on([found[run] for run in own], infos[cell.dataset].classes)
        ]
        for cell, own in of.items()
    }
    runs = [run for own in again.values() for run in own]
    if runs:
        reporter.say(f"{len(runs)} runs that were stopped are carried on: nothing is clearly ahead")
        found |= _execute_all("stopped runs carried on", runs, datasets, place, reporter)
    choices = []
    for cell, own in of.items():
        resumed = {run.step_size: run for run in again[cell]}
        tried = [found[resumed.get(run.step_size, run)] for run in own]
        best = winner(tried)
        choices.append(Choice(cell, None if best is None else best.run.step_size, list(map(_tried, tried))))
        reporter.say(str(choices[-1]))
    store.write_json(place.out / "choices.json", [choice.to_json() for choice in choices])
    return choices


def final_runs(study: Study, choice: Choice, data: str) -> list[Run]:
    """The runs on all the training data, and for an invariant method one from scales that round nothing."""
    if choice.step_size is None:
        return []
    runs = study.final_runs(choice.cell, data, choice.step_size)
    exact = study.exact_run(choice.cell, data, choice.step_size)
    return [*runs, exact] if exact else runs


def _tried(run: Recorded) -> Tried:
    error, epoch = run.best
    return Tried(run.run.step_size, run.status, error, epoch, run.reason, run.run.name)


def _execute_all(
    title: str, runs: Sequence[Run], datasets: Datasets, place: Place, reporter: Reporter
) -> dict[Run, Recorded]:
    """What of these is not recorded yet; returns all of them."""
    found = {run: recorded(run, place.runs, place.habits) for run in runs}
    done = {run: ended for run, ended in found.items() if ended is not None}
    missing = [run for run in runs if run not in done]
    if done:
        reporter.say(f"{title}: {len(done)} of {len(runs)} done before")
    return done | _execute(title, missing, datasets, place, reporter) if missing else done


def _execute(
    title: str, missing: Sequence[Run], datasets: Datasets, place: Place, reporter: Reporter
) -> dict[Run, Recorded]:
    reporter.phase(title, sum(run.epochs for run in missing))
    note(place.out / "manifest.json", place.device)
    for run in missing:
        data = datasets[run.dataset]
        traced(run.net, data.shape, run.hidden, data.classes)
    problems = Problems(datasets, place.device)
    stopping = threading.Event()

    def watch(run: Run, line: Line) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        reporter.epoch(run, line)

    def one(run: Run) -> Recorded:
        ended = execute(run, problems.of(run), place.runs, watch, place.habits)
        reporter.ended(ended)
        return ended

    if place.lanes == 1:
        return {run: one(run) for run in missing}
    # Several runs share the machine: one alone leaves part of it idle.
    with ThreadPoolExecutor(place.lanes) as pool:
        waiting = [pool.submit(one, run) for run in missing]
        try:
            wait(waiting, return_when=FIRST_EXCEPTION)
            for failed in (future for future in waiting if future.done() and future.exception()):
                failed.result()
            return {run: future.result() for run, future in zip(missing, waiting, strict=True)}
        except BaseException:
            stopping.set()
            for future in waiting:
                future.cancel()
            raise
