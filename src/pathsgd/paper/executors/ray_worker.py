"""What a worker of a Ray cluster does: it trains one run at a time, and writes no file."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch

from pathsgd.paper.config import Run
from pathsgd.paper.data.dataset import Dataset
from pathsgd.paper.records.manifest import Manifest, make_manifest
from pathsgd.paper.records.recorder import Event
from pathsgd.paper.records.run_folder import Metrics, decode_checkpoint
from pathsgd.paper.training.initial_network import trace_network
from pathsgd.paper.training.lanes import check_memory, choose_lanes
from pathsgd.paper.training.run_loop import Checkpoints, train_epochs
from pathsgd.paper.training.training_data import TrainingDataCache


@dataclass(frozen=True)
class Workplace:
    """What all tasks of a study share."""

    datasets: tuple[tuple[str, Any], ...]
    """By name, as references into Ray's object store, so that a worker fetches only what it trains on."""
    device: torch.device
    threads: int
    """Of torch on the driver."""
    weights: int
    """Of the largest network."""
    methods: tuple[str, ...]
    lanes: int | None
    alone: bool


def copy_thread_settings(threads: int) -> dict[str, str]:
    """The environment in which a process has the threads that this one has.

    Ray sets OMP_NUM_THREADS to the CPUs of a task unless it is set, and a BLAS reads it once, when it is
    loaded: ``torch.set_num_threads`` in a worker does not bring back what it lacks then.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        "OMP_NUM_THREADS": str(threads),
        **{name: os.environ[name] for name in names if name in os.environ},
    }


class Worker:
    """What a worker process keeps from task to task.

    It has as many threads as a local run, since their number may change the last bits of a sum. The
    environment of its tasks has to say it, too: see :func:`copy_thread_settings`.
    """

    def __init__(self, workplace: Workplace) -> None:
        device, weights = workplace.device, workplace.weights
        torch.set_num_threads(workplace.threads)
        check_memory(device, weights)
        self.lanes = choose_lanes(device, weights, workplace.lanes, workplace.methods, workplace.alone)
        self.manifest = make_manifest(device)
        self.cache = TrainingDataCache(_FetchedDatasets(workplace.datasets), device)


class _FetchedDatasets(dict[str, Dataset]):
    """Fetches a data set when it is asked for, and keeps none: what is prepared of them is kept."""

    def __init__(self, references: tuple[tuple[str, Any], ...]) -> None:
        super().__init__()
        self.references = dict(references)

    def __missing__(self, name: str) -> Dataset:
        return ray.get(self.references[name])


_find_worker = functools.lru_cache(maxsize=1)(Worker)


def choose_resources(workplace: Workplace) -> tuple[int, int]:
    """Runs at a time on a device like this worker's, and the threads of each."""
    return _find_worker(workplace).lanes, torch.get_num_threads()


def call(workplace: Workplace, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function as a run would be trained."""
    _find_worker(workplace)
    return function(*arguments)


def train_task(
    workplace: Workplace,
    run: Run,
    recorded: tuple[bytes, list[Metrics]] | None,
    checkpoints: Checkpoints,
) -> Iterator[Manifest | Event]:
    """Where the run is trained, and then everything that has to be recorded of it.

    ``recorded`` are the checkpoint and the lines that the driver has.
    """
    worker = _find_worker(workplace)
    yield worker.manifest
    data = worker.cache.get(run)
    trace_network(run, data)
    saved = None if recorded is None else decode_checkpoint(run, *recorded)
    yield from train_epochs(run, data, saved, checkpoints)
