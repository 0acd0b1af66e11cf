"""Metrics for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pathsgd import PathError
from pathsgd.paper.config import Run
from pathsgd.paper.progress import Progress
from pathsgd.paper.records.run_folder import Metrics, RunRecord


class TensorBoardProgress(Progress):
    """Writes the metrics of every run to a folder of its own, and passes all calls on to another progress."""

    def __init__(self, inner: Progress, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise PathError("--tensorboard needs TensorBoard: pip install 'pathsgd[tensorboard]'") from None
        self.inner, self.folder, self._make_writer = inner, folder, SummaryWriter
        self._writers: dict[str, Any] = {}

    def start_phase(self, title: str, epochs: int) -> None:
        self.inner.start_phase(title, epochs)

    def epoch(self, run: Run, metrics: Metrics) -> None:
        self.inner.epoch(run, metrics)
        if run.name not in self._writers:
            # A resumed run tells its epochs again from the first.
            self._writers[run.name] = self._make_writer(str(self.folder / run.name), purge_step=0)
        for name, value in metrics.items():
            if name != "epoch" and value is not None:
                self._writers[run.name].add_scalar(name, value, metrics["epoch"])

    def run_ended(self, record: RunRecord) -> None:
        self.inner.run_ended(record)
        writer = self._writers.pop(record.run.name, None)
        if writer is not None:
            writer.close()

    def message(self, text: str) -> None:
        self.inner.message(text)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self.inner.close()
