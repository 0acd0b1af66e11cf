"""What is kept of a run: its configuration, a line of numbers per epoch, a checkpoint, and how it ended.

config.json     the configuration
metrics.jsonl   one line per epoch, epoch 0 before the first step
checkpoint.pt   the state after some epoch; gone when the run has ended
result.json     how it ended, with a checksum of the lines: a run without it goes on from its checkpoint
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from pathsgd.console.files import write_atomically
from pathsgd.errors import PathError
from pathsgd.paper.config import Run
from pathsgd.paper.config_json import from_json
from pathsgd.paper.experiment import store
from pathsgd.paper.experiment.memory import bytes_of

Status = Literal["done", "diverged", "stopped"]
Line = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """A run that has ended."""

    run: Run
    status: Status
    lines: list[Line]
    reason: str = ""

    @property
    def epochs(self) -> int:
        return len(self.lines) - 1

    def curve(self, name: str) -> list[float]:
        """One of the numbers, epoch by epoch; nan where it was not finite."""
        return [math.nan if line.get(name) is None else float(line[name]) for line in self.lines]

    @property
    def errors(self) -> list[float]:
        """On what it was evaluated on."""
        return self.curve(f"{self.run.evaluates_on}_error")

    @property
    def best(self) -> tuple[float, int]:
        """The lowest error after any epoch but the last of a run that diverged, and the first such epoch."""
        found = [(e, k) for k, e in enumerate(self.errors) if k and math.isfinite(e)]
        return min(found, default=(1.0, 0))


class Folder:
    """The files of one run."""

    def __init__(self, runs: Path, run: Run) -> None:
        self.run = run
        self.path = runs / run.name
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.result = self.path / "result.json"

    def recorded(self) -> Recorded | None:
        """The run, if it has ended and its files are as it left them."""
        try:
            return read(self.path)
        except PathError:
            return None

    def begin(self, lines: list[Line]) -> None:
        """Makes the folder hold exactly these lines."""
        store.write_json(self.path / "config.json", dataclasses.asdict(self.run))
        self.result.unlink(missing_ok=True)
        write_atomically(self.metrics, b"".join(map(store.line, lines)))

    def add(self, values: Line) -> None:
        with self.metrics.open("ab") as file:
            file.write(store.line(values))

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        content = io.BytesIO()
        seal = _seal(self.run, epoch, store.lines_of(self.metrics), state)
        torch.save({"epoch": epoch, "state": state, "seal": seal}, content)
        write_atomically(self.checkpoint, content.getvalue())

    def saved(self) -> tuple[dict[str, Any], list[Line]] | None:
        """The last checkpoint and the lines up to it; None if there is none that can be trusted."""
        if not self.checkpoint.exists():
            return None
        try:
            # weights_only: a file that was meddled with cannot run anything.
            found = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            epoch, state = int(found["epoch"]), found["state"]
            lines = store.lines_of(self.metrics)[: epoch + 1]
            whole = len(lines) == epoch + 1 and found["seal"] == _seal(self.run, epoch, lines, state)
        except OSError:
            raise
        except Exception:
            return None  # begun anew, which comes to the same numbers
        return (state, lines) if whole else None

    def end(self, status: Status, reason: str, seconds: float, keep_checkpoint: bool) -> None:
        digest = _digest(self.metrics.read_bytes(), status, reason)
        store.write_json(
            self.result,
            {"status": status, "reason": reason, "seconds": round(seconds, 3), "digest": digest},
        )
        self.tidy(keep_checkpoint)

    def tidy(self, keep_checkpoint: bool) -> None:
        """Removes what a run that has ended does not need, and what a kill left half written."""
        if not keep_checkpoint:
            self.checkpoint.unlink(missing_ok=True)
        for left in self.path.glob(".*.*"):
            left.unlink(missing_ok=True)


def read(path: Path) -> Recorded:
    """A run that has ended; an error if it has not, or if its files are not as it left them."""
    result = store.read_json(path / "result.json")
    run = from_json(Run, store.read_json(path / "config.json"), str(path / "config.json"))
    metrics = path / "metrics.jsonl"
    content = metrics.read_bytes() if metrics.exists() else b""
    if not isinstance(result, dict) or result.get("status") not in ("done", "diverged", "stopped"):
        raise PathError(f"{path / 'result.json'} is not the result of a run")
    status, reason = result["status"], str(result.get("reason", ""))
    if result.get("digest") != _digest(content, status, reason) or run.name != path.name:
        raise PathError(f"{path} was changed after the run had ended: delete it to run it again")
    return Recorded(run, status, store.lines_of(metrics), reason)


def _digest(metrics: bytes, status: str, reason: str) -> str:
    return hashlib.sha256(metrics + f"{status}\n{reason}".encode()).hexdigest()


def _seal(run: Run, epoch: int, lines: list[Line], state: Any) -> str:
    """Of a checkpoint: whose it is, what it follows on, and every bit of it."""
    digest = hashlib.sha256(f"{run.name} {epoch} ".encode())
    digest.update(b"".join(map(store.line, lines[: epoch + 1])))
    _add(digest, state)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        for part in bytes_of(value.detach().cpu()):
            digest.update(part)
    elif isinstance(value, dict):
        for key, one in value.items():
            digest.update(repr(key).encode())
            _add(digest, one)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}".encode())
        for one in value:
            _add(digest, one)
    else:
        digest.update(repr(value).encode())
