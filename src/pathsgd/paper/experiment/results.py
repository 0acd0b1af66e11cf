"""What a study has found, read from its folder: everything that figures, tables and claims are made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathsgd.errors import PathError
from pathsgd.paper.config import Cell, Run, Study
from pathsgd.paper.config_json import from_json
from pathsgd.paper.data.dataset import short_name
from pathsgd.paper.experiment import manifest, store
from pathsgd.paper.experiment.manifest import Manifest
from pathsgd.paper.experiment.record import Recorded, read
from pathsgd.paper.optimizers import find_method


@dataclass(frozen=True)
class DataInfo:
    """A data set as it was loaded."""

    checksum: str
    shape: tuple[int, ...]
    classes: int
    train: int
    test: int


@dataclass(frozen=True)
class Tried:
    """One step size."""

    step_size: float
    status: str
    best_error: float
    best_epoch: int
    reason: str
    run: str


@dataclass(frozen=True)
class Choice:
    """The step size of a cell; None if none ended well."""

    cell: Cell
    step_size: float | None
    tried: list[Tried]

    def to_json(self) -> dict[str, Any]:
        return {
            "cell": dataclasses.asdict(self.cell),
            "step_size": self.step_size,
            "tried": [dataclasses.asdict(tried) for tried in self.tried],
        }

    @classmethod
    def from_json(cls, value: Any, where: str) -> Choice:
        try:
            tried = [from_json(Tried, one, where) for one in value["tried"]]
            return cls(from_json(Cell, value["cell"], where), value["step_size"], tried)
        except (TypeError, KeyError) as error:
            raise PathError(f"{where} is not what a search wrote ({error})") from None

    @property
    def best(self) -> Tried | None:
        return next((tried for tried in self.tried if tried.step_size == self.step_size), None)

    def _edge(self) -> str:
        """Beyond which there may be a better one."""
        sizes = [tried.step_size for tried in self.tried]
        if len(sizes) < 3 or self.step_size not in (min(sizes), max(sizes)):
            return ""
        return ", the largest tried" if self.step_size == max(sizes) else ", the smallest tried"

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


def describe(of: Cell | Run) -> str:
    dropout = f", dropout {of.dropout:g}" if of.dropout else ""
    return f"{short_name(of.dataset)}, {find_method(of.method).label}, {of.init}{dropout}"


@dataclass(frozen=True)
class Results:
    """A study, read."""

    out: Path
    study: Study
    manifests: list[Manifest]
    """Of the processes that trained the runs."""
    data: dict[str, DataInfo]
    choices: list[Choice]
    finals: dict[Cell, list[Recorded]]
    """The final runs of each cell, one for each repeat; none where no step size ended well."""
    exact: dict[Cell, Recorded]
    """Of balanced cells of invariant methods: the first run again, rescaled by powers of two."""

    @classmethod
    def load(cls, out: Path) -> Results:
        if not (out / "study.json").exists():
            raise PathError(f"{out} holds no study: run `pathsgd reproduce --out {out}` first")
        study = from_json(Study, store.read_json(out / "study.json"), str(out / "study.json"))
        data = {
            name: from_json(DataInfo, info, str(out / "data.json"))
            for name, info in _object(out / "data.json").items()
        }
        if not (out / "choices.json").exists():
            raise PathError(f"the study in {out} has not chosen its step sizes yet: let it go on")
        where = str(out / "choices.json")
        choices = [Choice.from_json(one, where) for one in store.read_json(out / "choices.json")]
        finals: dict[Cell, list[Recorded]] = {}
        exact: dict[Cell, Recorded] = {}
        for choice in choices:
            cell = choice.cell
            finals[cell] = []
            if choice.step_size is None:
                continue
            checksum = data[cell.dataset].checksum
            for run in study.final_runs(cell, checksum, choice.step_size):
                finals[cell].append(_read(out / "runs" / run.name))
            again = study.exact_run(cell, checksum, choice.step_size)
            if again is not None:
                exact[cell] = _read(out / "runs" / again.name)
        manifests = manifest.read(out / "manifest.json")
        return cls(out, study, manifests, data, choices, finals, exact)


def _object(path: Path) -> dict[str, Any]:
    found = store.read_json(path)
    if not isinstance(found, dict):
        raise PathError(f"{path}: expected an object")
    return found


def _read(path: Path) -> Recorded:
    if not (path / "result.json").exists():
        raise PathError(
            f"the study in {path.parent.parent} has runs to go: `pathsgd reproduce` with the same options "
            "takes it up"
        )
    return read(path)
