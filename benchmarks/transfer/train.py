"""One job: a network trained once by one method at one rate; and the record of it."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pathsgd

from .methods import make_optimizer, needs_paths
from .networks import NETWORKS
from .step import CapturedStep, TrainingStep
from .tasks import Task, load_task

Record = dict[str, Any]

STARTS = ("balanced", "unbalanced", "balanced+balance", "unbalanced+balance")
"""Each ``+balance`` also with the orders of its norm, as ``+balance(2,inf)``."""


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        network: a name of NETWORKS.
        method: see methods.py.
        lr: the rate; None is the method's default.
        start: the weights as initialised, or after ``unbalance``; with "+balance" or "+balance(p,q)" after
            ``balance``, too.
        seed: of the initialisation and of the order of the data.
        epochs: an epoch of text is as many steps as the task says.
    """

    network: str
    method: str
    lr: float | None = None
    start: str = "balanced"
    seed: int = 0
    epochs: int = 5


class OutOfTime(Exception):
    """The time of the whole run ended in the middle of a job."""


def run_job(
    job: Job, folder: Path, device: str, *, steps: int | None = None, deadline: float = math.inf
) -> Record:
    """The record of a job. Whatever goes wrong is in its ``failure``.

    Args:
        job: what to run.
        folder: where CIFAR-10 is.
        device: where to run.
        steps: at most so many steps an epoch.
        deadline: ``time.monotonic()`` after which to give up.

    Raises:
        OutOfTime: the deadline has passed.
    """
    began = time.perf_counter()
    record: Record = asdict(job)
    try:
        task = load_task(NETWORKS[job.network].task, folder, device)
        if steps is not None:
            task = task.shortened(steps)
        record |= train(job, task, device, deadline)
    except OutOfTime:
        raise
    except Exception as error:  # a job must not take the others with it
        record["failure"] = f"{type(error).__name__}: {error}"[:500]
    record["seconds"] = round(time.perf_counter() - began, 2)
    record["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    record["torch"] = torch.__version__
    return record


def train(job: Job, task: Task, device: str, deadline: float = math.inf) -> Record:
    """Trains and validates."""
    began = time.perf_counter()
    torch.manual_seed(job.seed)
    model = NETWORKS[job.network].build().to(device)
    generator = torch.Generator(device).manual_seed(1000 + job.seed)
    paths = None
    if needs_paths(job.method) or job.start != "balanced":
        paths = _trace(job.network, task)
    set_start(model, paths, job.start)
    optimizer = make_optimizer(job.method, model, paths, job.lr)
    rate = float(optimizer.param_groups[0]["lr"])
    factor = warm_up_and_cosine(job.epochs * task.steps)
    step = TrainingStep(model, optimizer) if device == "cpu" else CapturedStep(model, optimizer)
    setup = time.perf_counter() - began

    chance = math.log(task.classes)
    losses: list[float] = []
    for epoch in range(job.epochs):
        step.total.zero_()
        for k, (x, y) in enumerate(task.epoch(generator), epoch * task.steps):
            step(x, y, factor(k))
        losses.append(round(step.total.item() / task.steps, 5))
        if not math.isfinite(losses[-1]):
            break
        if time.monotonic() > deadline:
            raise OutOfTime
    model.eval()
    valid = task.validate(model)
    finite = math.isfinite(losses[-1]) and all(map(math.isfinite, valid.values()))
    return {
        "rate": rate,
        "metric": task.metric,
        "value": round(valid[task.metric], 4) if finite else None,
        "validation": {name: round(value, 4) if finite else None for name, value in valid.items()},
        "losses": losses,
        "diverged": not finite or losses[-1] > 1.1 * chance,
        "setup_seconds": round(setup, 2),
        "data": task.data_hash,
    }


@functools.cache
def _traced(network: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> pathsgd.PathGraph:
    model = NETWORKS[network].build().to(device)
    return pathsgd.trace(model, torch.zeros(shape, dtype=dtype, device=device))


def _trace(network: str, task: Task) -> pathsgd.PathGraph:
    """Traces once in a process: a graph knows parameters by name, so it serves every copy of a network."""
    x = task.example
    return _traced(network, tuple(x.shape), x.dtype, str(x.device))


def parse_start(start: str) -> tuple[str, dict[str, float] | None]:
    """The word before ``+balance``, and the orders that ``balance`` is called with; None without it."""
    match = re.fullmatch(r"(balanced|unbalanced)(\+balance(?:\(([^,]+),([^,]+)\))?)?", start)
    if match is None:
        raise ValueError(f"there is no start {start!r}; there are {', '.join(STARTS)}, +balance(p,q)")
    weights, balance, p, q = match.groups()
    if balance is None:
        return weights, None
    return weights, {} if p is None else {"p": float(p), "q": float(q)}


def set_start(model: nn.Module, paths: pathsgd.PathGraph | None, start: str) -> None:
    """Rescales a model in place to one of STARTS; it computes the same."""
    weights, orders = parse_start(start)
    if weights == "unbalanced":
        pathsgd.unbalance(model, paths, generator=torch.Generator().manual_seed(3))
    if orders is not None:
        pathsgd.balance(model, paths, **orders)


def warm_up_and_cosine(total: int) -> Callable[[int], float]:
    """The factor of the rate at a step: up over the first 5%, then down to zero."""
    warm = max(1, total // 20)
    return lambda step: min(1, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1, step / total)))
