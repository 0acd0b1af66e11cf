"""Progress of long work: callbacks, and lines in the terminal."""

from __future__ import annotations

import math
import sys

from study.config import Run
from study.results import describe
from study.runs import Metrics, RunRecord


class Progress:
    """Callbacks for long work, which do nothing: override what you need.

    Runs that are trained at the same time call from threads of their own. An exception ends the work; what
    was recorded is resumed next time.
    """

    def start_phase(self, title: str, epochs: int) -> None:
        """Announces work of at most this many epochs."""

    def epoch(self, run: Run, metrics: Metrics) -> None:
        """Reports an epoch of a run; a resumed run reports the recorded ones again."""

    def run_ended(self, record: RunRecord) -> None:
        """Reports the end of a run."""

    def message(self, text: str) -> None:
        """Prints a line for the user."""


class TerminalProgress(Progress):
    """Lines on stdout, and a count of epochs on stderr if that is a terminal."""

    def __init__(self, quiet: bool = False, every_epoch: bool = False) -> None:
        self.quiet, self.every_epoch = quiet, every_epoch
        self.counts = not quiet and not every_epoch and sys.stderr.isatty()
        self.epochs = self.total = 0

    def start_phase(self, title: str, epochs: int) -> None:
        self.epochs, self.total = 0, epochs
        self.message(f"{title}: {epochs} epoch{'s at most' if epochs > 1 else ''}")

    def epoch(self, run: Run, metrics: Metrics) -> None:
        self.epochs += metrics["epoch"] > 0
        if self.every_epoch:
            self.message(describe_metrics(metrics))
        elif self.counts:
            print(f"\r{self.epochs} of {self.total} epochs", end="\r", file=sys.stderr, flush=True)

    def run_ended(self, record: RunRecord) -> None:
        if not record.run.validation and not self.every_epoch:
            run = f"{describe(record.run)}, step size {record.run.step_size:g}, seed {record.run.seed.init}"
            self.message(f"{run}: {record.status}, test error {record.errors[-1]:.2%}")

    def message(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)


def describe_metrics(metrics: Metrics) -> str:
    """Formats the metrics of an epoch.

    >>> describe_metrics({"epoch": 3, "train_loss": 0.25, "test_error": None})
    'epoch 3: train loss 0.25, test error not finite'
    """

    def text(name: str, value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return "not finite"
        return f"{value:.2%}" if name.endswith("error") else f"{value:.4g}"

    rest = [f"{name.replace('_', ' ')} {text(name, v)}" for name, v in metrics.items() if name != "epoch"]
    return f"epoch {metrics['epoch']}: {', '.join(rest)}"
