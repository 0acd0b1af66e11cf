"""Trains the runs of a list that are not recorded yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathsgd.paper.config import Run
from pathsgd.paper.executors.executor import Executor
from pathsgd.paper.progress import Progress
from pathsgd.paper.records.run_folder import RunRecord
from pathsgd.paper.training.run_loop import Checkpoints, find_record


@dataclass(frozen=True)
class RunQueue:
    """Where runs are recorded, and what trains them."""

    out: Path
    executor: Executor
    checkpoints: Checkpoints
    progress: Progress

    @property
    def runs(self) -> Path:
        return self.out / "runs"

    def train_all(self, title: str, runs: Sequence[Run]) -> dict[Run, RunRecord]:
        """The records of these runs, trained where there is none yet."""
        found = {run: find_record(run, self.runs, self.checkpoints) for run in runs}
        done = {run: record for run, record in found.items() if record is not None}
        missing = [run for run in runs if run not in done]
        if done:
            self.progress.message(f"{title}: {len(done)} of {len(runs)} done before")
        if not missing:
            return done
        self.progress.start_phase(title, sum(run.epochs for run in missing))
        return done | self.executor.train(missing, self.out, self.checkpoints, self.progress)
