"""The same numbers for TensorBoard, for those who like to watch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pathsgd.errors import PathError
from pathsgd.paper.config import Run
from pathsgd.paper.experiment.conduct import Reporter
from pathsgd.paper.experiment.record import Line, Recorded


class Logged:
    """A reporter that also writes; one folder for each run."""

    def __init__(self, reporter: Reporter, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise PathError("--tensorboard needs TensorBoard: pip install 'pathsgd[tensorboard]'") from None
        self._make = SummaryWriter
        self.reporter, self.folder = reporter, folder
        self._writers: dict[str, Any] = {}

    def phase(self, title: str, epochs: int) -> None:
        self.reporter.phase(title, epochs)

    def epoch(self, run: Run, line: Line) -> None:
        self.reporter.epoch(run, line)
        if run.name not in self._writers:
            # What an interrupted run wrote is told again from its beginning.
            self._writers[run.name] = self._make(str(self.folder / run.name), purge_step=0)
        for name, value in line.items():
            if name != "epoch" and value is not None:
                self._writers[run.name].add_scalar(name, value, line["epoch"])

    def ended(self, run: Recorded) -> None:
        self.reporter.ended(run)
        writer = self._writers.pop(run.run.name, None)
        if writer is not None:
            writer.close()

    def say(self, text: str) -> None:
        self.reporter.say(text)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self.reporter.close()
