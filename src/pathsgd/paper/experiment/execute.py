"""One run from wherever it stands to its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pathsgd.console.machine import allow_tf32
from pathsgd.paper.config import Run
from pathsgd.paper.experiment.problem import Problem
from pathsgd.paper.experiment.record import Folder, Line, Recorded, Status
from pathsgd.paper.experiment.streams import own_streams
from pathsgd.paper.experiment.training import Measured, Training

HOPELESS = 0.9
"""Of the error of guessing: a run that is not below it after its grace is stopped."""
Watch = Callable[[Run, Line], None]
"""Told of every epoch."""


@dataclass(frozen=True)
class Habits:
    """How runs are executed, which changes none of their numbers."""

    checkpoint_seconds: float = 30.0
    keep_checkpoints: bool = False


def recorded(run: Run, runs: Path, habits: Habits) -> Recorded | None:
    """The run, if it has ended and left what it should; a kill may have come before it was tidied up."""
    folder = Folder(runs, run)
    found = folder.recorded()
    if found is None or (habits.keep_checkpoints and not folder.checkpoint.exists()):
        return None
    folder.tidy(habits.keep_checkpoints)
    return found


def execute(run: Run, problem: Problem, runs: Path, watch: Watch, habits: Habits) -> Recorded:
    """Runs to the end, or finds that it has been. The same numbers whether it was interrupted or not."""
    found = recorded(run, runs, habits)
    if found is not None:
        return found
    folder = Folder(runs, run)
    if problem.train_x.is_cuda:
        allow_tf32(run.tf32)
    with own_streams(problem.train_x.device) as recording:
        start = time.monotonic()
        training = Training(run, problem, recording)
        status, reason = _carried_through(training, folder, watch, habits)
        folder.end(status, reason, time.monotonic() - start, habits.keep_checkpoints)
    ended = folder.recorded()
    assert ended is not None
    return ended


def _carried_through(training: Training, folder: Folder, watch: Watch, habits: Habits) -> tuple[Status, str]:
    """Epoch by epoch to the end: how it ended, and why."""
    run, problem = training.run, training.problem
    saved = folder.saved()
    lines: list[Line] = []
    if saved is None:
        folder.begin([])
        first = _line(run, 0, training.evaluate(problem.train_x, problem.train_y), _evaluated(training))
        lines.append(first)
        folder.add(first)
    else:
        state, lines = saved
        training.load_state_dict(state)
        folder.begin(lines)
    for line in lines:
        watch(run, line)
    status, reason = _judged(run, lines, problem.classes)
    checkpointed = time.monotonic()
    while status is None:
        trained = training.epoch()
        line = _line(run, len(lines), trained, _evaluated(training))
        lines.append(line)
        folder.add(line)
        watch(run, line)
        status, reason = _judged(run, lines, problem.classes)
        due = time.monotonic() - checkpointed >= habits.checkpoint_seconds
        if due or (status is not None and habits.keep_checkpoints):
            folder.save(len(lines) - 1, training.state_dict())
            checkpointed = time.monotonic()
    return status, reason


def _evaluated(training: Training) -> Measured:
    return training.evaluate(training.problem.evaluated_x, training.problem.evaluated_y)


def _line(run: Run, epoch: int, trained: Measured, evaluated: Measured) -> Line:
    name = run.evaluates_on
    return {
        "epoch": epoch,
        "train_loss": trained.loss,
        "train_error": trained.error,
        f"{name}_loss": evaluated.loss,
        f"{name}_error": evaluated.error,
    }


def _judged(run: Run, lines: list[Line], classes: int) -> tuple[Status | None, str]:
    """Whether a run is at its end, and why."""
    epoch, last = len(lines) - 1, lines[-1]
    losses = [last["train_loss"], last[f"{run.evaluates_on}_loss"]]
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return "diverged", f"the loss was not finite in epoch {epoch}"
    if run.grace and epoch == run.grace < run.epochs:
        best = min(line[f"{run.evaluates_on}_error"] for line in lines[1:])
        guessing = 1 - 1 / classes
        if best >= HOPELESS * guessing:
            return (
                "stopped",
                f"an error of {best:.1%} after {epoch} epochs, where guessing has {guessing:.1%}",
            )
    return ("done", "") if epoch >= run.epochs else (None, "")
