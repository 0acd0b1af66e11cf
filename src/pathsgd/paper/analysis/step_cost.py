"""The time of a training step with Path-SGD and with SGD, on a study's own network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import nn

from pathsgd import PathSGD
from pathsgd.console.devices import allow_tf32, device_name
from pathsgd.console.timing import capture, median_us
from pathsgd.paper.config import Study
from pathsgd.paper.records.study_results import DataInfo, StepCost
from pathsgd.paper.training.initial_network import make_network

SECONDS = 1.5
"""For each method."""
ROUNDS = 3
"""On a CPU, with new models: where a model lies in memory can cost a third of its speed."""
LR = 1e-30
"""So small that no weight changes: a network that diverges would be timed on NaNs."""


def measure_step_cost(study: Study, info: DataInfo, device: torch.device) -> StepCost:
    """Whole training steps, timed in turn."""
    rounds = 1 if device.type == "cuda" else ROUNDS
    if device.type == "cuda":
        allow_tf32(study.tf32)
    times = [_time_steps(study, info, device, SECONDS / rounds) for _ in range(rounds)]
    sgd_us, path_us = (statistics.median(times_of) for times_of in zip(*times, strict=True))
    name = "-".join(map(str, (math.prod(info.shape), *study.hidden, info.classes)))
    threads = f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    return StepCost(name, device_name(device) + threads, sgd_us, path_us)


def _time_steps(study: Study, info: DataInfo, device: torch.device, seconds: float) -> tuple[float, float]:
    """Microseconds of a step with SGD and with Path-SGD."""
    x = torch.randn(study.batch, math.prod(info.shape), device=device)
    y = torch.randint(info.classes, (study.batch,), device=device)

    def make_step(path: bool) -> tuple[Callable[[], object], object]:
        torch.manual_seed(0)
        model = make_network(study.net, info.shape, study.hidden, info.classes).to(device)
        optimizer: torch.optim.Optimizer = (
            PathSGD(model, x[:1], lr=LR) if path else torch.optim.SGD(model.parameters(), LR, fused=True)
        )

        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        step()
        return capture(step, device), step  # a CUDA graph does not keep what it works on: the step does

    steps = {"sgd": make_step(path=False), "path": make_step(path=True)}
    found = median_us({name: replay for name, (replay, _) in steps.items()}, seconds, device)
    return found["sgd"], found["path"]
