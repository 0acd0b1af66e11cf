"""Runs, sweeps and studies from Python. The command line calls these functions, too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pathsgd import PathError
from pathsgd.console.devices import find_device
from pathsgd.console.files import remove_temporaries
from pathsgd.console.optional_imports import import_optional
from pathsgd.paper.analysis.claims import find_undecided, judge_claims
from pathsgd.paper.analysis.step_cost import measure_step_cost
from pathsgd.paper.analysis.study_tables import make_tables
from pathsgd.paper.config import Run, Setup, Study, StudySetup
from pathsgd.paper.data.dataset import Dataset, check_learnable, short_name
from pathsgd.paper.data.load import load
from pathsgd.paper.executors.executor import Executor
from pathsgd.paper.executors.local import LocalExecutor
from pathsgd.paper.figures import draw_all
from pathsgd.paper.html_report import write_report
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.progress import Progress
from pathsgd.paper.records.folder_lock import lock_folder
from pathsgd.paper.records.json_files import encode, read_json, write_json
from pathsgd.paper.records.manifest import add_manifest, make_manifest
from pathsgd.paper.records.run_folder import RunFolder, RunRecord
from pathsgd.paper.records.study_results import Choice, DataInfo, StudyResults
from pathsgd.paper.run_queue import RunQueue
from pathsgd.paper.step_size_search import search_step_sizes
from pathsgd.paper.training.initial_network import count_weights, make_network
from pathsgd.paper.training.lanes import check_memory, choose_lanes
from pathsgd.paper.training.run_loop import Checkpoints, find_record, train_run
from pathsgd.paper.training.training_data import check_enough_points, prepare_data


def train(
    run: Run,
    out: Path | str,
    setup: Setup | None = None,
    *,
    data: Dataset | None = None,
    progress: Progress | None = None,
) -> RunRecord:
    """Trains one network, and records every epoch in ``out/runs/<run.name>``.

    An interrupted run is resumed from its checkpoint, and ends with the same numbers. A run that is recorded
    already is not trained again.

    Args:
        run: What is trained.
        out: The folder of the results.
        setup: The device, the folder of the data, how often to save.
        data: The data set; by default the one that ``run.dataset`` names is loaded.
        progress: Callbacks.

    Returns:
        The record of the run, with ``run.data`` filled in.

    Raises:
        PathError: The data, the device or the folder cannot be used, or there is not enough memory.

    Example:
        >>> import tempfile
        >>> from pathsgd.paper import Run, train
        >>> run = Run(method="path-sgd", step_size=0.1, hidden=(16,), epochs=2)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     record = train(run, out)
        >>> record.status, record.epochs
        ('done', 2)
    """
    setup = setup or Setup()
    datasets = _load([run.dataset], setup, None if data is None else {run.dataset: data})
    data = datasets[run.dataset]
    run = dataclasses.replace(run, data=DataInfo.of(data).checksum)
    with _open(out, datasets, run, [run.method], setup, progress, keep_checkpoints=True) as queue:
        device = queue.executor.device
        prepared = prepare_data(data, run, device)
        queue.progress.start_phase(METHODS[run.method].label, run.epochs)
        if find_record(run, queue.runs, queue.checkpoints) is None:
            add_manifest(queue.runs / run.name / "manifest.json", make_manifest(device))
        record = train_run(run, prepared, queue.runs, queue.progress.epoch, queue.checkpoints)
        queue.progress.run_ended(record)
    return record


def sweep(
    study: Study,
    out: Path | str,
    setup: StudySetup | None = None,
    *,
    data: Mapping[str, Dataset] | None = None,
    progress: Progress | None = None,
) -> list[Choice]:
    """Chooses a step size for every data set, dropout, initialisation and method of a study.

    Args:
        study: What is compared; only its search runs are trained.
        out: The folder of the results.
        setup: The device, the folder of the data, how often to save, runs at a time, Ray.
        data: The data sets by their name in ``study.datasets``; those that are missing are loaded.
        progress: Callbacks.

    Returns:
        One choice for each of ``study.cells()``, also in ``out/choices.json``.

    Raises:
        PathError: The data, the device or the folder cannot be used, or the folder holds another study.

    Example:
        >>> import tempfile
        >>> from pathsgd.paper import Study, sweep
        >>> study = Study(
        ...     methods=("path-sgd",),
        ...     inits=("balanced",),
        ...     dropouts=(0.0,),
        ...     hidden=(16,),
        ...     step_sizes=(0.1, 0.01),
        ...     search_epochs=2,
        ...     validation=300,
        ... )
        >>> with tempfile.TemporaryDirectory() as out:
        ...     (choice,) = sweep(study, out)
        >>> choice.step_size
        0.1
    """
    setup = setup or StudySetup()
    datasets = _load(study.datasets, setup, data)
    with _open(out, datasets, study, study.methods, setup, progress) as queue:
        return search_step_sizes(study, _begin_study(study, datasets, queue, setup.replace), queue)


def reproduce(
    study: Study,
    out: Path | str,
    setup: StudySetup | None = None,
    *,
    data: Mapping[str, Dataset] | None = None,
    progress: Progress | None = None,
    figures: bool = True,
) -> StudyResults:
    """Runs a whole study: chooses step sizes, trains the final runs, judges the claims, draws the figures.

    In a study from one start the claims cannot be judged: its methods are ranked instead.

    The same call resumes a study that was interrupted, on a CPU with the same numbers to the last bit. Runs
    are found by their configuration: a changed study keeps the runs it shares with the old one.

    Args:
        study: What is compared; ``PRESETS["small"]`` takes minutes on a laptop.
        out: The folder of the results.
        setup: The device, the folder of the data, how often to save, runs at a time, Ray.
        data: The data sets by their name in ``study.datasets``; those that are missing are loaded.
        progress: Callbacks.
        figures: Whether to draw the figures and write the report, for which matplotlib and jinja2 are needed.

    Returns:
        The results; ``judge_claims(results)`` and ``summarize_study(results)`` tell what they say.

    Raises:
        PathError: The data, the device or the folder cannot be used, the folder holds another study, or a
            package is missing.

    Example:
        >>> import tempfile
        >>> from pathsgd.paper import Study, judge_claims, reproduce
        >>> study = Study(
        ...     methods=("sgd", "path-sgd"),
        ...     dropouts=(0.0,),
        ...     hidden=(16,),
        ...     step_sizes=(0.1,),
        ...     search_epochs=2,
        ...     epochs=2,
        ...     repeats=2,
        ...     validation=300,
        ... )
        >>> with tempfile.TemporaryDirectory() as out:
        ...     results = reproduce(study, out, figures=False)
        ...     judge_claims(results)[0].verdict  # the same curves from a rescaled start
        'agrees'
    """
    setup = setup or StudySetup()
    if figures:
        _require_drawing()
    datasets = _load(study.datasets, setup, data)
    with _open(out, datasets, study, study.methods, setup, progress) as queue:
        infos = _begin_study(study, datasets, queue, setup.replace)
        choices = search_step_sizes(study, infos, queue)
        finals = [run for c in choices for run in c.final_runs(study, infos[c.cell.dataset].checksum)]
        queue.train_all("final runs", finals)
        if study.more_repeats:
            undecided = find_undecided(StudyResults.load(queue.out))
            queue.train_all(
                "further seeds",
                [
                    run
                    for c in choices
                    if c.cell in undecided
                    for run in c.more_runs(study, infos[c.cell.dataset].checksum)
                ],
            )
        queue.progress.message("timing a step")
        info = infos[study.datasets[0]]
        cost = queue.executor.call(measure_step_cost, study, info, queue.executor.device)
        write_json(queue.out / "cost.json", dataclasses.asdict(cost))
        results = StudyResults.load(queue.out)
        _conclude(results, queue.progress, figures)
    return results


def redraw(out: Path | str, *, progress: Progress | None = None) -> StudyResults:
    """Judges the claims, draws the figures and writes the report of a recorded study. Trains nothing.

    Args:
        out: The folder of the study.
        progress: Callbacks.

    Returns:
        The results that were read.

    Raises:
        PathError: There is no finished study in the folder, its files were changed, or a package is missing.

    Example:
        >>> redraw("nowhere")
        Traceback (most recent call last):
        ...
        pathsgd.errors.PathError: nowhere holds no study: run `pathsgd reproduce --out nowhere` first
    """
    _require_drawing()
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


def _require_drawing() -> None:
    import_optional("matplotlib", "drawing")
    import_optional("jinja2", "the report")


def _load(names: Sequence[str], setup: Setup, given: Mapping[str, Dataset] | None) -> dict[str, Dataset]:
    given = given or {}
    for data in given.values():
        check_learnable(data)
    return {
        name: given[name] if name in given else load(name, setup.data_dir, download=setup.download)
        for name in names
    }


@contextmanager
def _open(
    out: Path | str,
    datasets: Mapping[str, Dataset],
    config: Run | Study,
    methods: Sequence[str],
    setup: Setup,
    progress: Progress | None,
    keep_checkpoints: bool = False,
) -> Iterator[RunQueue]:
    """Locks the folder, and opens what trains networks of this size."""
    out, progress = Path(out), progress or Progress()
    with _open_executor(datasets, config, methods, setup) as executor, lock_folder(out):
        if setup.tensorboard:
            from pathsgd.paper.tensorboard import TensorBoardProgress

            progress = TensorBoardProgress(progress, out / "tensorboard")
        try:
            with report_out_of_memory():
                checkpoints = Checkpoints(setup.checkpoint_seconds, keep_checkpoints)
                yield RunQueue(out, executor, checkpoints, progress)
        finally:
            progress.close()


@contextmanager
def _open_executor(
    datasets: Mapping[str, Dataset], config: Run | Study, methods: Sequence[str], setup: Setup
) -> Iterator[Executor]:
    weights = max(count_weights(config, data) for data in datasets.values())
    lanes = setup.lanes if isinstance(setup, StudySetup) else None
    if config.tf32 and (lanes or 1) > 1:
        raise PathError("--tf32 is a setting of the whole process, which path methods change: --lanes 1")
    alone = config.tf32 or config.net == "conv"  # whose activations take more memory than its weights
    if isinstance(setup, StudySetup) and setup.executor == "ray":
        try:
            from pathsgd.paper.executors.ray import open_ray_executor
        except ImportError as error:
            raise PathError("--executor ray needs Ray: pip install 'pathsgd[ray]'") from error
        with open_ray_executor(
            setup.address, datasets, setup.device, weights, methods, lanes, alone
        ) as executor:
            yield executor
        return
    device = find_device(setup.device)
    check_memory(device, weights)
    lanes = choose_lanes(device, weights, lanes, methods, alone)
    yield LocalExecutor(datasets, device, lanes)


@contextmanager
def report_out_of_memory() -> Iterator[None]:
    """Turns the errors of a full memory into a PathError."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else "MemoryError"
        # A CPU reports it in a plain RuntimeError.
        parts = ("out of memory", "allocate memory", "not enough memory", "size calculation overflowed")
        if isinstance(error, RuntimeError) and not any(part in text for part in parts):
            raise
        raise PathError(f"out of memory: {text}; try smaller --hidden, or --lanes 1") from None


def _begin_study(
    study: Study, datasets: Mapping[str, Dataset], queue: RunQueue, replace: bool
) -> dict[str, DataInfo]:
    """Checks that the study can be run, and writes its configuration into the folder."""
    for run in study.all_search_runs():
        check_enough_points(datasets[run.dataset], run)
    with torch.device("meta"):
        for data in datasets.values():
            make_network(study.net, data.shape, study.hidden, data.classes)
    infos, out = {name: DataInfo.of(data) for name, data in datasets.items()}, queue.out
    study_fields, data_fields = (
        dataclasses.asdict(study),
        {n: dataclasses.asdict(i) for n, i in infos.items()},
    )
    different = _find_differences(out / "study.json", study_fields, dataclasses.asdict(Study()))
    different += [f"data of {short_name(n)}" for n in _find_differences(out / "data.json", data_fields, {})]
    if different and not replace:
        raise PathError(
            f"{out} holds another study ({', '.join(different)} differ): choose another folder (--out), or "
            "--replace it: its runs stay, and those in common are not run again"
        )
    if different:
        stale = ["choices.json", "claims.json", "cost.json", "report.html"]
        runs = [r for cell in study.cells() for r in study.search_runs(cell, infos[cell.dataset].checksum)]
        if all(RunFolder(queue.runs, run).find_record() is None for run in runs):
            stale.append("manifest.json")
        for name in stale:
            (out / name).unlink(missing_ok=True)
    remove_temporaries(out)
    write_json(out / "study.json", study_fields)
    write_json(out / "data.json", data_fields)
    return infos


def _find_differences(path: Path, values: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """The entries in which a JSON file is not this; an entry that it lacks is at its default."""
    if not path.exists():
        return []
    try:
        found = read_json(path, dict)
    except PathError:
        return [path.name]
    found, values = json.loads(encode({**defaults, **found})), json.loads(encode(values))
    return [name for name in {**found, **values} if found.get(name) != values.get(name)]
