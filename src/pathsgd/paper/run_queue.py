"""Trains the runs of a list that are not recorded yet, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from pathsgd.paper.config import Run
from pathsgd.paper.data.dataset import Dataset
from pathsgd.paper.progress import Progress
from pathsgd.paper.records.manifest import add_manifest
from pathsgd.paper.records.run_folder import Metrics, RunRecord
from pathsgd.paper.training.initial_network import trace_network
from pathsgd.paper.training.run_loop import Checkpoints, find_record, train_run
from pathsgd.paper.training.training_data import TrainingDataCache


@dataclass(frozen=True)
class RunQueue:
    """Where and how runs are trained."""

    out: Path
    datasets: Mapping[str, Dataset]
    device: torch.device
    lanes: int
    """Runs at a time."""
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
        return done | self._train(title, missing) if missing else done

    def _train(self, title: str, runs: Sequence[Run]) -> dict[Run, RunRecord]:
        self.progress.start_phase(title, sum(run.epochs for run in runs))
        add_manifest(self.out / "manifest.json", self.device)
        for run in runs:
            trace_network(run, self.datasets[run.dataset])  # not beside other runs: see there
        cache = TrainingDataCache(self.datasets, self.device)
        stopping = threading.Event()

        def on_epoch(run: Run, metrics: Metrics) -> None:
            if stopping.is_set():
                raise KeyboardInterrupt
            self.progress.epoch(run, metrics)

        def train(run: Run) -> RunRecord:
            record = train_run(run, cache.get(run), self.runs, on_epoch, self.checkpoints)
            self.progress.run_ended(record)
            return record

        if self.lanes == 1:
            return {run: train(run) for run in runs}
        with ThreadPoolExecutor(self.lanes) as pool:
            futures = [pool.submit(train, run) for run in runs]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                for failed in (future for future in futures if future.done() and future.exception()):
                    failed.result()
                return {run: future.result() for run, future in zip(runs, futures, strict=True)}
            except BaseException:
                stopping.set()
                for future in futures:
                    future.cancel()
                raise
