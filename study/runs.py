"""Recorded runs and studies, believed only as they were left.

runs/NAME/config.json     the configuration of a run
runs/NAME/metrics.jsonl   one line per epoch, epoch 0 before the first step
runs/NAME/checkpoint.pt   the state after some epoch; deleted when the run has ended
runs/NAME/result.json     how the run ended, with a checksum of the lines; without it the run is resumed
study.json, data.json     the configuration of a study, and the data sets as they were loaded
choices.json, cost.json   the step sizes that were tried and chosen, and the time of a training step
manifest.json, note.txt   how and where the runs were trained, and what else a reader should know of the data
"""

import dataclasses
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from pathsgd import PathError
from study.config import Cell, Run, Study
from study.data import Dataset, short_name
from study.files import encode_line, from_json, read_json, read_lines, read_list, write_atomically, write_json
from study.methods import find_method

Status = Literal["done", "diverged", "stopped"]
Metrics = dict[str, Any]  # epoch, loss and error in training and evaluated; None where they are not finite
Saved = tuple[dict[str, Any], list[Metrics]]  # the state after some epoch, and the lines up to it


@dataclass(frozen=True)
class RunRecord:
    """A run that has ended: diverged if a loss was not finite, stopped if it had learned nothing."""

    run: Run
    status: Status
    lines: list[Metrics]  # the metrics of every epoch; epoch 0 is before the first step
    reason: str = ""  # why it ended early

    def curve(self, name: str) -> list[float]:
        """One of the metrics epoch by epoch; nan where it was not finite."""
        return [math.nan if line.get(name) is None else float(line[name]) for line in self.lines]

    @property
    def errors(self) -> list[float]:
        return self.curve(f"{self.run.evaluates_on}_error")

    @property
    def best(self) -> tuple[float, int]:
        """Lowest error after any epoch, and the first epoch that reached it."""
        errors = [(e, k) for k, e in enumerate(self.errors) if k and math.isfinite(e)]
        return min(errors, default=(1.0, 0))


class RunFolder:
    def __init__(self, runs: Path, run: Run) -> None:
        self.run = run
        self.path = runs / run.name
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.result = self.path / "result.json"

    def find_record(self, keep_checkpoint: bool = False) -> RunRecord | None:
        """Returns the run, if it has ended and its files are as it left them."""
        try:
            record = read_record(self.path)
        except PathError:
            return None
        return None if keep_checkpoint and not self.checkpoint.exists() else record

    def begin(self, lines: list[Metrics]) -> None:
        """Makes the folder hold exactly these lines."""
        write_json(self.path / "config.json", dataclasses.asdict(self.run))
        self.result.unlink(missing_ok=True)
        write_atomically(self.metrics, b"".join(map(encode_line, lines)))

    def add_line(self, line: Metrics) -> None:
        with self.metrics.open("ab") as file:
            file.write(encode_line(line))

    def save(self, lines: list[Metrics], state: dict[str, Any]) -> None:
        """Writes the state after the last of these lines, in place of the last checkpoint.

        A checksum behind it, which torch.load ignores, ties it to the run and the lines before it.
        """
        content = io.BytesIO()
        torch.save({"epoch": len(lines) - 1, "state": state}, content)
        write_atomically(self.checkpoint, content.getvalue() + self._seal(lines, content.getvalue()))

    def load(self) -> Saved | None:
        """Reads the checkpoint and the lines up to it; None if they are not what this run left."""
        try:
            content = self.checkpoint.read_bytes()
            # weights_only: reading a manipulated file runs no code.
            saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            lines = read_lines(self.metrics)[: saved["epoch"] + 1]
            sound = len(lines) == saved["epoch"] + 1 and content.endswith(self._seal(lines, content[:-64]))
            return (saved["state"], lines) if sound else None
        except Exception:
            return None  # the run starts again, and ends with the same numbers

    def _seal(self, lines: list[Metrics], content: bytes) -> bytes:
        head = f"{self.run.name} {len(lines) - 1} ".encode() + b"".join(map(encode_line, lines))
        return hashlib.sha256(head + content).hexdigest().encode()

    def end(self, status: Status, reason: str, seconds: float, keep_checkpoint: bool) -> None:
        digest = _digest(self.metrics.read_bytes(), status, reason)
        result = {"status": status, "reason": reason, "seconds": round(seconds, 3), "digest": digest}
        write_json(self.result, result)
        self.clean_up(keep_checkpoint)

    def clean_up(self, keep_checkpoint: bool) -> None:
        """Removes what a run that has ended does not need, and temporary files that a kill has left."""
        if not keep_checkpoint:
            self.checkpoint.unlink(missing_ok=True)
        for left in self.path.glob(".*.tmp"):
            left.unlink()


def read_record(path: Path) -> RunRecord:
    """Reads the run in a folder; an error if it has not ended, or if its files have changed since."""
    result = read_json(path / "result.json")
    run = from_json(Run, read_json(path / "config.json"), str(path / "config.json"))
    metrics = path / "metrics.jsonl"
    content = metrics.read_bytes() if metrics.exists() else b""
    if not isinstance(result, dict) or result.get("status") not in ("done", "diverged", "stopped"):
        raise PathError(f"{path / 'result.json'} is not the result of a run")
    status, reason = result["status"], str(result.get("reason", ""))
    if result.get("digest") != _digest(content, status, reason) or run.name != path.name:
        raise PathError(f"{path} was changed after the run had ended: delete it to run it again")
    return RunRecord(run, status, read_lines(metrics), reason)


def _digest(metrics: bytes, status: str, reason: str) -> str:
    return hashlib.sha256(metrics + f"{status}\n{reason}".encode()).hexdigest()


@dataclass(frozen=True)
class DataInfo:
    checksum: str
    shape: tuple[int, ...]
    classes: int
    train: int
    test: int

    @classmethod
    def of(cls, data: Dataset) -> "DataInfo":
        return cls(data.checksum, data.shape, data.classes, len(data.train_y), len(data.test_y))


@dataclass(frozen=True)
class Trial:
    step_size: float
    status: str
    best_error: float
    best_epoch: int
    reason: str
    run: str

    @property
    def outcome(self) -> str:
        return f"{self.best_error:.2%}" if self.status == "done" else self.status


@dataclass(frozen=True)
class Choice:
    """The step size chosen for a cell, and all that were tried."""

    cell: Cell
    step_size: float | None  # the one with the lowest validation error; None if no run ended well
    tried: list[Trial]
    beyond: Trial | None = None  # where the largest wins, one that is ten times as large: shown and not used

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
        return next((trial for trial in self.tried if trial.step_size == self.step_size), None)

    def __str__(self) -> str:
        counts = {s: sum(t.status == s for t in self.tried) for s in ("diverged", "stopped")}
        rest = "".join(f", {count} {status}" for status, count in counts.items() if count)
        name, tried = describe(self.cell), f"of {len(self.tried)} tried{rest}"
        if self.best is None:
            return f"{name}: no step size ended well ({tried})"
        error = f"validation error {self.best.best_error:.2%} in epoch {self.best.best_epoch}"
        return f"{name}: step size {self.best.step_size:g}{self._edge()} ({tried}), {error}"

    def _edge(self) -> str:
        sizes = [trial.step_size for trial in self.tried]
        if self.step_size is None or not is_edge(self.step_size, sizes):
            return ""
        if self.step_size == min(sizes):
            return ", the smallest tried"
        beyond = f"; {self.beyond.step_size:g}: {self.beyond.outcome}" if self.beyond else ""
        return f", the largest tried{beyond}"


def is_edge(size: float, sizes: Sequence[float]) -> bool:
    """Whether a better one may lie outside; of one or two each is an edge, which says nothing."""
    return len(sizes) > 2 and size in (min(sizes), max(sizes))


def describe(of: Cell | Run) -> str:
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
    finals: dict[Cell, list[RunRecord]]  # one for each repeat and further ones; none without a step size
    exact: dict[Cell, RunRecord]  # the first final run again, rescaled by powers of two
    manifests: list[dict[str, Any]]
    cost: StepCost | None = None  # the time of a step; None if it was not measured
    note: str = ""

    @property
    def seeds(self) -> str:
        """Number of seeds of the cells: ``3``, or ``3 to 5``."""
        counts = sorted({len(runs) for runs in self.finals.values() if runs}) or [0]
        return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])

    @classmethod
    def load(cls, out: Path) -> "StudyResults":
        """Reads a study; a PathError if there is none, it has not ended, or its files were changed."""
        if not (out / "study.json").exists():
            raise PathError(f"{out} holds no study: run `python -m study reproduce --out {out}` first")
        study = from_json(Study, read_json(out / "study.json"), str(out / "study.json"))
        infos = read_json(out / "data.json", dict)
        data = {name: from_json(DataInfo, info, str(out / "data.json")) for name, info in infos.items()}
        path = out / "choices.json"
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
        path, note, manifests = out / "cost.json", out / "note.txt", read_list(out / "manifest.json")
        cost = from_json(StepCost, read_json(path), str(path)) if path.exists() else None
        text = note.read_text("utf-8", errors="replace").strip() if note.exists() else ""
        return cls(out, study, data, choices, finals, exact, manifests, cost, text)
