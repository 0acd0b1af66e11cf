"""Runs in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pathsgd.paper.config import Run
from pathsgd.paper.data.dataset import Dataset
from pathsgd.paper.progress import Progress
from pathsgd.paper.records.manifest import add_manifest, make_manifest
from pathsgd.paper.records.run_folder import Metrics, RunRecord
from pathsgd.paper.training.initial_network import trace_network
from pathsgd.paper.training.run_loop import Checkpoints, train_run
from pathsgd.paper.training.training_data import TrainingDataCache


@dataclass(frozen=True)
class LocalExecutor:
    """Trains on one device of this machine."""

    datasets: Mapping[str, Dataset]
    device: torch.device
    lanes: int
    """Runs at a time."""

    def train(
        self, runs: Sequence[Run], out: Path, checkpoints: Checkpoints, progress: Progress
    ) -> dict[Run, RunRecord]:
        add_manifest(out / "manifest.json", make_manifest(self.device))
        for run in runs:
            trace_network(run, self.datasets[run.dataset])  # not beside other runs: see there
        cache = TrainingDataCache(self.datasets, self.device)
        stopping = threading.Event()

        def on_epoch(run: Run, metrics: Metrics) -> None:
            if stopping.is_set():
                raise KeyboardInterrupt
            progress.epoch(run, metrics)

        def train(run: Run) -> RunRecord:
            record = train_run(run, cache.get(run), out / "runs", on_epoch, checkpoints)
            progress.run_ended(record)
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

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)
