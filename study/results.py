"""Results of a study, read from its folder: all that figures, tables and claims are made from.

study.json     the configuration
data.json      the data sets as they were loaded
choices.json   the step sizes that were tried and chosen
cost.json      the time of a training step
manifest.json  how and where the runs were trained
note.txt       what else a reader should know of the data, by whoever ran it; may be missing
runs/          a folder for each run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathsgd import PathError
from study.config import Cell, Run, Study
from study.dataset import Dataset, short_name
from study.files import from_json, read_json
from study.manifest import Manifest, read_manifests
from study.methods import find_method
from study.runs import RunRecord, read_record


@dataclass(frozen=True)
class DataInfo:
    """A data set as it was loaded."""

    checksum: str
    shape: tuple[int, ...]
    classes: int
    train: int
    test: int

    @classmethod
    def of(cls, data: Dataset) -> DataInfo:
        return cls(data.checksum, data.shape, data.classes, len(data.train_y), len(data.test_y))


@dataclass(frozen=True)
class Trial:
    """The search run of one step size."""

    step_size: float
    status: str
    best_error: float
    best_epoch: int
    reason: str
    run: str

    @property
    def outcome(self) -> str:
        """Validation error, or how the run ended instead."""
        return f"{self.best_error:.2%}" if self.status == "done" else self.status

    def __str__(self) -> str:
        return f"{self.step_size:g}: {self.outcome}"


@dataclass(frozen=True)
class Choice:
    """The step size chosen for a cell, and all that were tried."""

    cell: Cell
    step_size: float | None
    """The one with the lowest validation error; None if no run ended well."""
    tried: list[Trial]
    beyond: Trial | None = None
    """Where the largest wins, one that is ten times as large: shown and not used."""

    def final_runs(self, study: Study, data: str) -> list[Run]:
        """Runs on all the training data; for an invariant method one more, rescaled by powers of two."""
        if self.step_size is None:
            return []
        exact = study.exact_run(self.cell, data, self.step_size)
        runs = study.final_runs(self.cell, data, self.step_size)
        return [*runs, exact] if exact else runs

    def more_runs(self, study: Study, data: str) -> list[Run]:
        """Runs with further seeds, for a verdict that hangs on their number."""
        return [] if self.step_size is None else study.final_runs(self.cell, data, self.step_size, more=True)

    @property
    def best(self) -> Trial | None:
        """Trial of the chosen step size."""
        return next((trial for trial in self.tried if trial.step_size == self.step_size), None)

    def __str__(self) -> str:
        counts = {s: sum(t.status == s for t in self.tried) for s in ("diverged", "stopped")}
        rest = "".join(f", {count} {status}" for status, count in counts.items() if count)
        name, tried = describe(self.cell), f"of {len(self.tried)} tried{rest}"
        if self.best is None:
            return f"{name}: no step size ended well ({tried})"
        return (
            f"{name}: step size {self.best.step_size:g}{self._edge()} ({tried}), validation error "
            f"{self.best.best_error:.2%} in epoch {self.best.best_epoch}"
        )

    def _edge(self) -> str:
        """Returns a note where a better step size may lie outside of those tried."""
        sizes = [trial.step_size for trial in self.tried]
        if self.step_size is None or not is_edge(self.step_size, sizes):
            return ""
        if self.step_size == min(sizes):
            return ", the smallest tried"
        return ", the largest tried" + (f"; {self.beyond}" if self.beyond else "")


def is_edge(size: float, sizes: Sequence[float]) -> bool:
    """Whether a better one may lie outside; of one or two each is an edge, which says nothing."""
    return len(sizes) > 2 and size in (min(sizes), max(sizes))


def describe(of: Cell | Run) -> str:
    """Data set, method and initialisation in a few words."""
    dropout = f", dropout {of.dropout:g}" if of.dropout else ""
    return f"{short_name(of.dataset)}, {find_method(of.method).label}, {of.init}{dropout}"


@dataclass(frozen=True)
class StepCost:
    """The time of a whole training step on the study's network, with SGD and with Path-SGD."""

    net: str
    device: str
    sgd_us: float
    path_us: float

    @property
    def ratio(self) -> float:
        return self.path_us / self.sgd_us


@dataclass(frozen=True)
class StudyResults:
    """A study whose runs have ended."""

    out: Path
    study: Study
    data: dict[str, DataInfo]
    choices: list[Choice]
    finals: dict[Cell, list[RunRecord]]
    """The final runs of each cell, one for each repeat, and the further ones that were run; none where no
    step size ended well."""
    exact: dict[Cell, RunRecord]
    """For balanced cells of invariant methods the first final run again, rescaled by powers of two."""
    manifests: list[Manifest]
    cost: StepCost | None = None
    """The time of a step; None if it was not measured."""
    note: str = ""

    @property
    def seeds(self) -> str:
        """Number of seeds of the cells: ``3``, or ``3 to 5``."""
        counts = sorted({len(runs) for runs in self.finals.values() if runs}) or [0]
        return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])

    @classmethod
    def load(cls, out: Path) -> StudyResults:
        """Reads a study; a PathError if there is none, it has not ended, or its files were changed."""
        if not (out / "study.json").exists():
            raise PathError(f"{out} holds no study: run `python -m study reproduce --out {out}` first")
        study = from_json(Study, read_json(out / "study.json"), str(out / "study.json"))
        infos = read_json(out / "data.json", dict)
        data = {name: from_json(DataInfo, info, str(out / "data.json")) for name, info in infos.items()}
        path = out / "choices.json"
        if not path.exists():
            raise PathError(f"the study in {out} has not chosen its step sizes yet: let it go on")
        choices = [from_json(Choice, one, str(path)) for one in read_json(path, list)]
        finals: dict[Cell, list[RunRecord]] = {}
        exact: dict[Cell, RunRecord] = {}
        for choice in choices:
            cell, checksum = choice.cell, data[choice.cell.dataset].checksum
            paths = [out / "runs" / run.name for run in choice.final_runs(study, checksum)]
            if not all((path / "result.json").exists() for path in paths):
                command = "`python -m study reproduce` with the same options resumes it"
                raise PathError(f"the study in {out} has runs to go: {command}")
            records = list(map(read_record, paths))
            more = (out / "runs" / run.name for run in choice.more_runs(study, checksum))
            finals[cell] = records[: study.repeats]
            finals[cell] += [read_record(path) for path in more if (path / "result.json").exists()]
            if len(records) > study.repeats:
                exact[cell] = records[-1]
        path = out / "cost.json"
        cost = from_json(StepCost, read_json(path), str(path)) if path.exists() else None
        path = out / "note.txt"
        note = path.read_text("utf-8", errors="replace").strip() if path.exists() else ""
        manifests = read_manifests(out / "manifest.json")
        return cls(out, study, data, choices, finals, exact, manifests, cost, note)
