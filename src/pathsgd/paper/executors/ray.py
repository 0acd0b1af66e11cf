"""Runs as tasks on a Ray cluster, recorded by this process: the driver.

A cluster shares no disk. A task streams its epochs and checkpoints to the driver, which alone writes into the
folder of the study. When a worker dies, the run becomes a new task that goes on from the last checkpoint the
driver has; Ray's own retries would begin again from what the first task was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray import exceptions

from pathsgd import PathError
from pathsgd.paper.config import Run
from pathsgd.paper.data.dataset import Dataset
from pathsgd.paper.executors.ray_connection import connect
from pathsgd.paper.executors.ray_worker import (
    Workplace,
    call,
    choose_resources,
    copy_thread_settings,
    train_task,
)
from pathsgd.paper.progress import Progress
from pathsgd.paper.records.manifest import Manifest, add_manifest, make_manifest
from pathsgd.paper.records.recorder import Epoch, Recorder
from pathsgd.paper.records.run_folder import RunFolder, RunRecord
from pathsgd.paper.training.run_loop import Checkpoints

LOST = (
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.OutOfMemoryError,
)
"""A worker has died, or what it had sent was lost with its node."""
MOST_LOSSES = 5
"""Of a run in a row, without a checkpoint in between."""


@dataclass
class _Task:
    """A run that is being trained."""

    recorder: Recorder
    losses: int = 0

    @property
    def run(self) -> Run:
        return self.recorder.folder.run


class RayExecutor:
    """Trains on a cluster that this process is connected to.

    Args:
        datasets: All data sets of the study. Each is put into Ray's object store, once.
        device: ``cpu`` or ``cuda``; by default GPUs if the cluster has some.
        weights: Of the largest network.
        methods: All methods of the study.
        lanes: Runs at a time, on GPUs on each of them; by default what the cluster has room for.
        alone: Whether a run should not share a GPU, unless ``lanes`` says so.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        device: str | None,
        weights: int,
        methods: Sequence[str],
        lanes: int | None,
        alone: bool,
    ) -> None:
        self.device, threads = _find_device(device), torch.get_num_threads()
        references = tuple((name, ray.put(data)) for name, data in datasets.items())
        self.workplace = Workplace(references, self.device, threads, weights, tuple(methods), lanes, alone)
        self.environment = {"env_vars": copy_thread_settings(threads)}
        on_gpu = self.device.type == "cuda"
        self.at_a_time = math.inf if on_gpu or lanes is None else lanes
        self.whole_device: dict[str, float] = {"num_gpus": 1} if on_gpu else {"num_cpus": 1}
        chosen, threads = self._call(choose_resources, self.workplace)
        if not on_gpu:
            self.whole_device = {"num_cpus": min(threads, _count_cpus())}
        self.resources = share_gpu(chosen) if on_gpu else self.whole_device

    def train(
        self, runs: Sequence[Run], out: Path, checkpoints: Checkpoints, progress: Progress
    ) -> dict[Run, RunRecord]:
        start = ray.remote(train_task).options(
            num_returns="streaming", max_retries=0, runtime_env=self.environment, **self.resources
        )
        waiting = [
            _Task(Recorder(RunFolder(out / "runs", run), progress.epoch, checkpoints.keep, whole=True))
            for run in reversed(runs)
        ]
        running: dict[Any, _Task] = {}
        own = make_manifest(torch.device("cpu"))
        done: dict[Run, RunRecord] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.at_a_time:
                    task = waiting.pop()
                    recorded = task.recorder.folder.read_checkpoint()
                    running[start.remote(self.workplace, task.run, recorded, checkpoints)] = task
                (events, *_), _ = ray.wait(list(running))
                task = running.pop(events)
                try:
                    with _raise_causes():
                        event = ray.get(next(events))
                except StopIteration:
                    done[task.run] = task.recorder.find_record()
                    progress.run_ended(done[task.run])
                    continue
                except LOST as error:
                    _count_loss(task, error, progress)
                    waiting.append(task)
                    continue
                running[events] = task  # at the end, so that others have their turn
                if isinstance(event, dict):
                    _check_source(event, own)
                    add_manifest(out / "manifest.json", {**event, "command": own["command"]})
                else:
                    task.recorder.record(event)
                    if isinstance(event, Epoch) and event.checkpoint is not None:
                        task.losses = 0
        finally:
            for events in running:
                ray.cancel(events, force=True)
        return {run: done[run] for run in runs}

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._call(call, self.workplace, function, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        task = ray.remote(function).options(runtime_env=self.environment, **self.whole_device)
        with _raise_causes():
            return ray.get(task.remote(*arguments))


@contextmanager
def open_ray_executor(address: str | None, *arguments: Any) -> Iterator[RayExecutor]:
    """An executor with these arguments on the cluster at this address.

    Raises:
        PathError: There is none, or it has no such device.
    """
    with connect(address):
        yield RayExecutor(*arguments)


def share_gpu(lanes: int) -> dict[str, float]:
    """The resources of a task of which this many share a GPU.

    >>> share_gpu(3), share_gpu(6)  # not 0.1667: Ray counts in steps of 0.0001, and six would not fit
    ({'num_gpus': 0.3333}, {'num_gpus': 0.1666})
    """
    return {"num_gpus": math.floor(10_000 / lanes) / 10_000}


def _find_device(name: str | None) -> torch.device:
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    name = name or ("cuda" if has_gpus else "cpu")
    if name not in ("cpu", "cuda"):
        raise PathError(f"device {name!r} cannot be used with --executor ray: cpu or cuda")
    if name == "cuda" and not has_gpus:
        raise PathError("device 'cuda' cannot be used: the Ray cluster has no GPU")
    return torch.device(name)


def _count_cpus() -> float:
    """Of the largest node: a task that asks for more would wait forever."""
    return max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])


@contextmanager
def _raise_causes() -> Iterator[None]:
    """Raises what a task raised, rather than Ray's account of it."""
    try:
        yield
    except exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else None
        raise cause or error from None


def _count_loss(task: _Task, error: Exception, progress: Progress) -> None:
    task.losses += 1
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if task.losses == MOST_LOSSES:
        raise PathError(f"the worker of {task.run.name} died {task.losses} times in a row: {reason}")
    progress.message(f"the worker of {task.run.name} died and is replaced: {reason}")


def _check_source(worker: Manifest, own: Manifest) -> None:
    if worker["source"] != own["source"]:
        raise PathError("a node of the Ray cluster has another version of pathsgd: install the same on all")
