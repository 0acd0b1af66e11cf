"""Progress callbacks, and the progress bar of the terminal."""

from __future__ import annotations

import math
import sys
import threading
from importlib.util import find_spec
from typing import Any

from pathsgd.paper.config import Run
from pathsgd.paper.records.run_folder import Metrics, RunRecord
from pathsgd.paper.records.study_results import describe


class Progress:
    """Callbacks for long work. Does nothing by itself: override what you need.

    Runs that are trained at the same time call from threads of their own. An exception ends the work; what
    was recorded is resumed next time.

    Example:
        >>> class PrintEpochs(Progress):
        ...     def epoch(self, run, metrics):
        ...         print(run.method, metrics["epoch"], metrics["train_loss"])
    """

    def start_phase(self, title: str, epochs: int) -> None:
        """What follows takes at most this many epochs."""

    def epoch(self, run: Run, metrics: Metrics) -> None:
        """An epoch of a run has ended; of a resumed run the recorded epochs are told again."""

    def run_ended(self, record: RunRecord) -> None:
        """A run has ended."""

    def message(self, text: str) -> None:
        """A line for the user."""

    def close(self) -> None:
        """The work has ended or failed."""


class TerminalProgress(Progress):
    """A progress bar for each phase if stderr is a terminal and tqdm is installed, and lines on stdout.

    Args:
        quiet: Print nothing.
        every_epoch: Print a line for every epoch.
    """

    def __init__(self, quiet: bool = False, every_epoch: bool = False) -> None:
        self.quiet, self.every_epoch = quiet, every_epoch
        self._bar: Any = None
        self._lock = threading.Lock()

    def start_phase(self, title: str, epochs: int) -> None:
        self.close()
        if self.quiet:
            return
        if sys.stderr.isatty() and find_spec("tqdm") is not None:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=epochs, desc=title, unit="epoch", dynamic_ncols=True, leave=False)
        else:
            self.message(f"{title}: {epochs} epoch{'s at most' if epochs > 1 else ''}")

    def epoch(self, run: Run, metrics: Metrics) -> None:
        if self.every_epoch:
            self.message(describe_metrics(metrics))
        if self._bar is not None and metrics["epoch"]:
            with self._lock:
                self._bar.set_postfix_str(_describe_run(run), refresh=False)
                self._bar.update()

    def run_ended(self, record: RunRecord) -> None:
        if self._bar is not None:
            with self._lock:
                self._bar.total -= record.run.epochs - record.epochs  # epochs that will not come
                self._bar.refresh()
        elif not record.run.validation and not self.every_epoch:
            self.message(f"{_describe_run(record.run)}: {record.status}, test error {record.errors[-1]:.2%}")

    def message(self, text: str) -> None:
        if self.quiet:
            return
        with self._lock:
            if self._bar is None:
                print(text, flush=True)
            else:
                self._bar.write(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def describe_metrics(metrics: Metrics) -> str:
    """The metrics of an epoch as text.

    >>> describe_metrics({"epoch": 3, "train_loss": 0.25, "test_error": None})
    'epoch 3: train loss 0.25, test error not finite'
    """

    def text(name: str, value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return "not finite"
        return f"{value:.2%}" if name.endswith("error") else f"{value:.4g}"

    rest = [f"{name.replace('_', ' ')} {text(name, v)}" for name, v in metrics.items() if name != "epoch"]
    return f"epoch {metrics['epoch']}: {', '.join(rest)}"


def _describe_run(run: Run) -> str:
    return f"{describe(run)}, step size {run.step_size:g}, seed {run.seed.init}"
