"""One run, epoch by epoch, from its checkpoint to its end."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pathsgd.console.devices import allow_tf32
from pathsgd.paper.config import Run
from pathsgd.paper.records.recorder import Begun, Ended, Epoch, Event, OnEpoch, Recorder
from pathsgd.paper.records.run_folder import (
    Metrics,
    RunFolder,
    RunRecord,
    Saved,
    Status,
    encode_checkpoint,
)
from pathsgd.paper.training.cuda_graph import use_own_streams
from pathsgd.paper.training.trainer import LossAndError, Trainer
from pathsgd.paper.training.training_data import TrainingData

HOPELESS = 0.9
"""Of the error of guessing: a run that is not below it after its grace is stopped."""


@dataclass(frozen=True)
class Checkpoints:
    """How often a run is saved. Changes none of its numbers."""

    seconds: float = 30.0
    keep: bool = False
    """Whether the last checkpoint stays when the run has ended."""


def find_record(run: Run, runs: Path, checkpoints: Checkpoints) -> RunRecord | None:
    """The record of a run that has ended and left what it should, cleaned up after a kill at its end."""
    folder = RunFolder(runs, run)
    found = folder.find_record()
    if found is None or (checkpoints.keep and not folder.checkpoint.exists()):
        return None
    folder.clean_up(checkpoints.keep)
    return found


def train_run(
    run: Run, data: TrainingData, runs: Path, on_epoch: OnEpoch, checkpoints: Checkpoints
) -> RunRecord:
    """Trains to the end, or finds the record. An interruption changes no number."""
    found = find_record(run, runs, checkpoints)
    if found is not None:
        return found
    folder = RunFolder(runs, run)
    recorder = Recorder(folder, on_epoch, checkpoints.keep)
    with closing(train_epochs(run, data, folder.load(), checkpoints)) as events:
        for event in events:
            recorder.record(event)
    return recorder.find_record()


def train_epochs(
    run: Run, data: TrainingData, saved: Saved | None, checkpoints: Checkpoints
) -> Generator[Event]:
    """Trains from the start, or from what was saved, to the end, and touches no file."""
    if data.train_x.is_cuda:
        allow_tf32(run.tf32)
    with use_own_streams(data.train_x.device) as capture_stream:
        start = time.monotonic()
        trainer = Trainer(run, data, capture_stream)
        if saved is None:
            lines = [_metrics(run, 0, trainer.evaluate(data.train_x, data.train_y), trainer)]
        else:
            state, lines = saved
            trainer.load_state_dict(state)
        yield Begun(list(lines))
        saved_at = time.monotonic()
        status, reason = _judge(run, lines, data.classes)
        while status is None:
            lines.append(_metrics(run, len(lines), trainer.train_epoch(), trainer))
            status, reason = _judge(run, lines, data.classes)
            due = time.monotonic() - saved_at >= checkpoints.seconds
            checkpoint = None
            if due or (status is not None and checkpoints.keep):
                checkpoint = encode_checkpoint(run, lines, trainer.state_dict())
            yield Epoch(lines[-1], checkpoint)
            if due:
                saved_at = time.monotonic()
        yield Ended(status, reason, time.monotonic() - start)


def _metrics(run: Run, epoch: int, trained: LossAndError, trainer: Trainer) -> Metrics:
    evaluated = trainer.evaluate(trainer.data.evaluated_x, trainer.data.evaluated_y)
    return {
        "epoch": epoch,
        "train_loss": trained.loss,
        "train_error": trained.error,
        f"{run.evaluates_on}_loss": evaluated.loss,
        f"{run.evaluates_on}_error": evaluated.error,
    }


def _judge(run: Run, lines: list[Metrics], classes: int) -> tuple[Status | None, str]:
    """Whether a run is at its end, and why."""
    epoch, last = len(lines) - 1, lines[-1]
    losses = [last["train_loss"], last[f"{run.evaluates_on}_loss"]]
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return "diverged", f"the loss was not finite in epoch {epoch}"
    if run.grace and epoch == run.grace < run.epochs:
        best = min(line[f"{run.evaluates_on}_error"] for line in lines[1:])
        guessing = 1 - 1 / classes
        if best >= HOPELESS * guessing:
            reason = f"an error of {best:.1%} after {epoch} epochs, where guessing has {guessing:.1%}"
            return "stopped", reason
    return ("done", "") if epoch >= run.epochs else (None, "")
