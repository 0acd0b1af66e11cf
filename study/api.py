"""Runs, sweeps and studies from Python. The command line calls these functions, too.

The lowest validation error of a run that went to its end chooses the step size. Runs that were stopped since
they had learned nothing are trained to the end, unless another is clearly ahead. Where the largest step size
wins, one ten times as large is tried and shown; it is not used, since it is not of the paper's grid.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from pathsgd import PathError
from study.claims import find_undecided, judge_claims
from study.config import Run, Setup, Study, StudySetup
from study.data import Dataset, short_name
from study.figures import draw_all
from study.files import from_json, lock_folder, read_json, write_json
from study.methods import METHODS
from study.report import write_report
from study.run_queue import Progress, RunQueue, choose_lanes, find_device
from study.runs import Choice, DataInfo, RunRecord, StudyResults, Trial, is_edge
from study.sources import load
from study.tables import make_tables
from study.training import check_enough_points, measure_step_cost

CLEARLY_AHEAD = 0.8
"""Fraction of the error of guessing: with a winner below it, stopped runs stay stopped. A run is stopped at
0.9; of 14 that went on on CIFAR-10 behind winners at 0.54 to 0.69, the best came to 0.89."""


def search_step_sizes(study: Study, infos: Mapping[str, DataInfo], queue: RunQueue) -> list[Choice]:
    """Trains the search runs of every cell, and writes and returns its choices."""
    runs_of = {cell: study.search_runs(cell, infos[cell.dataset].checksum) for cell in study.cells()}
    records = queue.train_all("search for step sizes", [run for runs in runs_of.values() for run in runs])
    whole = {
        record.run: dataclasses.replace(record.run, grace=0)
        for cell, runs in runs_of.items()
        for record in find_stopped_too_early([records[run] for run in runs], infos[cell.dataset].classes)
    }
    if whole:
        queue.progress.message(f"{len(whole)} stopped runs are trained to the end: nothing is clearly ahead")
        records |= queue.train_all("stopped runs to the end", list(whole.values()))
    tried = {cell: [records[whole.get(run, run)] for run in runs] for cell, runs in runs_of.items()}
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


def find_stopped_too_early(records: Sequence[RunRecord], classes: int) -> list[RunRecord]:
    """Runs that were stopped though no other is clearly ahead."""
    best = choose_winner(records)
    if best is not None and best.best[0] < CLEARLY_AHEAD * (1 - 1 / classes):
        return []
    return [record for record in records if record.status == "stopped"]


def _trial(record: RunRecord) -> Trial:
    error, epoch = record.best
    return Trial(record.run.step_size, record.status, error, epoch, record.reason, record.run.name)


Data = Mapping[str, Dataset]  # data sets by their name in a run or a study; those that are missing are loaded
STALE = ("choices.json", "claims.json", "cost.json", "report.html")


def train(
    run: Run, out: Path | str, setup: Setup | None = None, *, data: Dataset | None = None,
    progress: Progress | None = None,
) -> RunRecord:  # fmt: skip
    """Trains one network from its checkpoint, unless it is recorded already, in ``out/runs/<run.name>``."""
    setup = setup or Setup()
    datasets = _load([run.dataset], setup, {run.dataset: data} if data else None)
    run = dataclasses.replace(run, data=datasets[run.dataset].checksum)
    check_enough_points(datasets[run.dataset], run)
    with _open(out, datasets, run.hidden, setup, progress, keep_checkpoints=True) as queue:
        return queue.train_all(METHODS[run.method].label, [run])[run]


def sweep(
    study: Study, out: Path | str, setup: StudySetup | None = None, *, data: Data | None = None,
    progress: Progress | None = None,
) -> list[Choice]:  # fmt: skip
    """Chooses a step size for each of ``study.cells()``, and writes it to ``out/choices.json``."""
    setup = setup or StudySetup()
    datasets = _load(study.datasets, setup, data)
    with _open(out, datasets, study.hidden, setup, progress) as queue:
        return search_step_sizes(study, _begin_study(study, queue, setup.replace), queue)


def reproduce(
    study: Study, out: Path | str, setup: StudySetup | None = None, *, data: Data | None = None,
    progress: Progress | None = None, figures: bool = True,
) -> StudyResults:  # fmt: skip
    """Runs a whole study: chooses step sizes, trains the final runs, judges the claims, draws the figures.

    In a study from one start the claims cannot be judged: its methods are ranked instead. The same call
    resumes a study that was interrupted, on a CPU with the same numbers to the last bit.
    """
    setup = setup or StudySetup()
    datasets = _load(study.datasets, setup, data)
    with _open(out, datasets, study.hidden, setup, progress) as queue:
        infos = _begin_study(study, queue, setup.replace)
        choices = search_step_sizes(study, infos, queue)
        checksums = {name: info.checksum for name, info in infos.items()}
        finals = [run for c in choices for run in c.final_runs(study, checksums[c.cell.dataset])]
        queue.train_all("final runs", finals)
        if study.more_repeats:
            undecided = find_undecided(StudyResults.load(queue.out))
            hanging = [choice for choice in choices if choice.cell in undecided]
            more = [run for c in hanging for run in c.more_runs(study, checksums[c.cell.dataset])]
            queue.train_all("further seeds", more)
        queue.progress.message("timing a step")
        cost = measure_step_cost(study, infos[study.datasets[0]], queue.device)
        write_json(queue.out / "cost.json", dataclasses.asdict(cost))
        results = StudyResults.load(queue.out)
        _conclude(results, queue.progress, figures)
    return results


def redraw(out: Path | str, *, progress: Progress | None = None) -> StudyResults:
    """Judges the claims, draws the figures and writes the report of a recorded study. Trains nothing."""
    results = StudyResults.load(Path(out))
    _conclude(results, progress or Progress(), figures=True)
    return results


def _conclude(results: StudyResults, progress: Progress, figures: bool) -> None:
    out, claims = results.out, judge_claims(results) if results.study.compares_starts else []
    if claims:
        write_json(out / "claims.json", [dataclasses.asdict(claim) for claim in claims])
    if figures:
        progress.message("drawing the figures")
        drawn = draw_all(results, out / "figures")
        for old in set((out / "figures").glob("figure*.*")) - set(drawn):
            old.unlink()  # of another study in the same folder
        write_report(results, make_tables(results), claims, drawn, out / "report.html")


def _load(names: Sequence[str], setup: Setup, given: Data | None) -> dict[str, Dataset]:
    for data in (given or {}).values():
        data.check_learnable()
    missing = [name for name in names if name not in (given or {})]
    loaded = {name: load(name, setup.data_dir, download=setup.download) for name in missing}
    return {**loaded, **(given or {})}


@contextmanager
def _open(
    out: Path | str, datasets: Data, hidden: Sequence[int], setup: Setup, progress: Progress | None,
    keep_checkpoints: bool = False,
) -> Iterator[RunQueue]:  # fmt: skip
    """Locks the folder, and makes the queue that trains networks of this size."""
    device, seconds = find_device(setup.device), setup.checkpoint_seconds
    networks = [(data.features, *hidden, data.classes) for data in datasets.values()]
    weights = max(sum(a * b for a, b in pairwise(widths)) for widths in networks)
    lanes = choose_lanes(device, weights, setup.lanes if isinstance(setup, StudySetup) else None)
    with lock_folder(Path(out)):
        yield RunQueue(Path(out), datasets, device, lanes, progress or Progress(), seconds, keep_checkpoints)


def _begin_study(study: Study, queue: RunQueue, replace: bool) -> dict[str, DataInfo]:
    """Checks that the study can be run, and writes its configuration into the folder."""
    for run in study.all_search_runs():
        check_enough_points(queue.datasets[run.dataset], run)
    infos, out = {name: DataInfo.of(queue.datasets[name]) for name in study.datasets}, queue.out
    data = {name: json.loads(json.dumps(dataclasses.asdict(info))) for name, info in infos.items()}
    if (out / "study.json").exists():
        old = from_json(Study, read_json(out / "study.json"), str(out / "study.json"))
        old_data = read_json(out / "data.json", dict) if (out / "data.json").exists() else data
        different = [name for name, value in vars(study).items() if getattr(old, name) != value]
        different += [f"data of {short_name(name)}" for name in data if old_data.get(name) != data[name]]
        if different and not replace:
            other = f"{out} holds another study ({', '.join(different)} differ)"
            raise PathError(f"{other}: choose another --out, or --replace it, which keeps runs in common")
        for name in STALE if different else ():
            (out / name).unlink(missing_ok=True)
    write_json(out / "study.json", dataclasses.asdict(study))
    write_json(out / "data.json", data)
    return infos
