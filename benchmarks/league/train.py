"""One job: a network trained once by one method; and the record of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pathsgd

from .methods import METHODS, make_optimizer, parse
from .networks import NETWORKS, load_task
from .step import CapturedStep, TrainingStep
from .tasks import Task

Record = dict[str, Any]

STARTS = ("usual", "unbalanced", "usual+balance", "unbalanced+balance")
POINTS = 20
"""Of the curve of training losses."""


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        network: a name of NETWORKS.
        method: with its options, see methods.py.
        seed: of the initialisation and of the order of the data.
        length: times the steps of the task.
        batch: times the examples of a step of the task.
        start: the weights as initialised, or after ``unbalance``; with "+balance" after ``balance``, too.
    """

    network: str
    method: str
    seed: int = 0
    length: float = 1.0
    batch: float = 1.0
    start: str = "usual"


class OutOfTime(Exception):
    """The time of the whole run ended in the middle of a job."""


def run_job(job: Job, folder: Path, device: str, deadline: float = math.inf) -> Record:
    """The record of a job. Whatever goes wrong is in its ``failure``.

    Args:
        job: what to run.
        folder: of the data.
        device: where to run.
        deadline: ``time.monotonic()`` after which to give up.

    Raises:
        OutOfTime: the deadline has passed.
    """
    began = time.perf_counter()
    record: Record = asdict(job)
    try:
        record |= train(job, load_task(NETWORKS[job.network].task, folder, device), device, deadline)
    except OutOfTime:
        raise
    except Exception as error:  # a job must not take the others with it
        record["failure"] = f"{type(error).__name__}: {error}"[:500]
    record["seconds"] = round(time.perf_counter() - began, 2)
    record["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    record["torch"] = torch.__version__
    return record


def train(job: Job, task: Task, device: str, deadline: float = math.inf) -> Record:
    """Trains, and evaluates on both held-out parts at the end."""
    began = time.perf_counter()
    network = NETWORKS[job.network]
    if job.batch != 1:
        task = replace(task, batch=max(1, round(task.batch * job.batch)))  # type: ignore[type-var]
    torch.manual_seed(job.seed)
    model = network.build().to(device)
    generator = torch.Generator(device).manual_seed(1000 + job.seed)
    set_start(model, task.example, job.start)
    optimizer = make_optimizer(job.method, model, task.example)
    steps = max(1, round(job.length * task.steps))
    schedule = network.schedule
    if schedule != "none":
        schedule = METHODS[parse(job.method)[0]].schedule or schedule
    factor = SCHEDULES[schedule](steps)
    captured = device == "cuda" and network.captured and getattr(optimizer, "captured", True)
    captured = captured and schedule != "none"  # a rate that the optimizer lowers itself is no tensor
    step = (CapturedStep if captured else TrainingStep)(model, task, optimizer)
    setup = time.perf_counter() - began

    marks = {round((k + 1) * steps / POINTS) for k in range(POINTS)}
    losses: list[float] = []
    last = 0
    for k, batch in enumerate(task.batches(model, generator, steps)):
        step(batch, factor(k))
        if k + 1 in marks:
            losses.append(step.total.item() / (k + 1 - last))
            step.total.zero_()
            last = k + 1
            if not math.isfinite(losses[-1]):
                break
            if time.monotonic() > deadline:
                raise OutOfTime
    if hasattr(optimizer, "eval"):  # the weights that are meant for use, where those trained are others
        optimizer.eval()
        measure_statistics(model, task, generator)
    model.eval()
    parts = {part: task.evaluate(model, part) for part in ("valid", "test")}
    numbers = [losses[-1], *(value for part in parts.values() for value in part.values())]
    diverged = not all(map(math.isfinite, numbers))
    return {
        "metric": task.metric,
        "valid": None if diverged else parts["valid"][task.metric],
        "test": None if diverged else parts["test"][task.metric],
        "others": parts,
        "losses": [float(f"{loss:.4g}") for loss in losses],
        "steps": steps,
        "setup_seconds": round(setup, 2),
        "data": task.data_hash,
    }


def set_start(model: nn.Module, example: Any, start: str) -> None:
    """Rescales a model in place to one of STARTS; it computes the same."""
    if start not in STARTS:
        raise ValueError(f"there is no start {start!r}; there are {', '.join(STARTS)}")
    weights, _, balance = start.partition("+")
    if weights == "unbalanced":
        pathsgd.unbalance(model, example, generator=torch.Generator().manual_seed(3))
    if balance:
        pathsgd.balance(model, example)


@torch.no_grad()
def measure_statistics(model: nn.Module, task: Task, generator: torch.Generator, steps: int = 50) -> None:
    """Takes the statistics of batch norms anew, for weights that they were not measured with."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all steps
        for batch in task.batches(model, generator, steps):
            task.loss(model, batch)


def warm_up_and_cosine(total: int) -> Callable[[int], float | None]:
    """The factor of the rate at a step: up over the first 5%, then down to zero."""
    warm = max(1, total // 20)
    return lambda step: min(1, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1, step / total)))


def warm_up(total: int) -> Callable[[int], float | None]:
    """Up over the first 5%, then all of the rate."""
    warm = max(1, total // 20)
    return lambda step: min(1, (step + 1) / warm)


SCHEDULES: dict[str, Callable[[int], Callable[[int], float | None]]] = {
    "warm-up": warm_up,
    "cosine": warm_up_and_cosine,
    "none": lambda total: lambda step: None,
}
