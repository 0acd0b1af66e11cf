"""Folders of runs: believed only as the run left them.

config.json     the configuration
metrics.jsonl   one line per epoch, epoch 0 before the first step
checkpoint.pt   the state after some epoch; deleted when the run has ended
result.json     how the run ended, with a checksum of the lines; without it the run is resumed
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

from pathsgd import PathError
from study.config import Run
from study.files import (
    checksum_state,
    encode_line,
    from_json,
    read_json,
    read_lines,
    remove_temporaries,
    write_atomically,
    write_json,
)

Status = Literal["done", "diverged", "stopped"]
Metrics = dict[str, Any]
"""The epoch, and loss and error in training and on what is evaluated; None where they are not finite."""
Saved = tuple[dict[str, Any], list[Metrics]]
"""The state after some epoch, and the lines up to it."""


@dataclass(frozen=True)
class RunRecord:
    """A run that has ended: diverged if a loss was not finite, stopped if it had learned nothing."""

    run: Run
    status: Status
    lines: list[Metrics]
    """The metrics of every epoch; epoch 0 is before the first step."""
    reason: str = ""
    """Why it ended early."""

    @property
    def epochs(self) -> int:
        return len(self.lines) - 1

    def curve(self, name: str) -> list[float]:
        """One of the metrics epoch by epoch; nan where it was not finite."""
        return [math.nan if line.get(name) is None else float(line[name]) for line in self.lines]

    @property
    def errors(self) -> list[float]:
        """Error on the validation points or the test set, epoch by epoch."""
        return self.curve(f"{self.run.evaluates_on}_error")

    @property
    def best(self) -> tuple[float, int]:
        """Lowest error after any epoch, and the first epoch that reached it."""
        errors = [(e, k) for k, e in enumerate(self.errors) if k and math.isfinite(e)]
        return min(errors, default=(1.0, 0))


class RunFolder:
    """Files of one run, below the folder ``runs``."""

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
        """Writes the state after the last of these lines, in place of the last checkpoint."""
        content = io.BytesIO()
        torch.save({"epoch": len(lines) - 1, "state": state, "seal": self._seal(lines, state)}, content)
        write_atomically(self.checkpoint, content.getvalue())

    def load(self) -> Saved | None:
        """Reads the checkpoint and the lines up to it; None if they are not what this run left."""
        try:
            # weights_only: reading a manipulated file runs no code.
            saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            epoch, state = int(saved["epoch"]), saved["state"]
            lines = read_lines(self.metrics)[: epoch + 1]
            sound = len(lines) == epoch + 1 and saved["seal"] == self._seal(lines, state)
        except Exception:
            return None  # the run starts again, and ends with the same numbers
        return (state, lines) if sound else None

    def _seal(self, lines: list[Metrics], state: Any) -> str:
        """Checksum that ties a checkpoint to its run, the lines before it and every bit of its state."""
        head = f"{self.run.name} {len(lines) - 1} ".encode() + b"".join(map(encode_line, lines))
        return checksum_state(head, state)

    def end(self, status: Status, reason: str, seconds: float, keep_checkpoint: bool) -> None:
        digest = _digest(self.metrics.read_bytes(), status, reason)
        result = {"status": status, "reason": reason, "seconds": round(seconds, 3), "digest": digest}
        write_json(self.result, result)
        self.clean_up(keep_checkpoint)

    def clean_up(self, keep_checkpoint: bool) -> None:
        """Removes what a run that has ended does not need, and temporary files that a kill has left."""
        if not keep_checkpoint:
            self.checkpoint.unlink(missing_ok=True)
        remove_temporaries(self.path)


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
