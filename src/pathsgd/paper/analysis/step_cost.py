"""The time of a training step with Path-SGD and with SGD, on a study's own network."""

from __future__ import annotations

import math

import torch

from pathsgd import PathSGD
from pathsgd.console.devices import allow_tf32, device_name
from pathsgd.console.timing import LR, time_training_steps
from pathsgd.paper.config import Study
from pathsgd.paper.records.study_results import DataInfo, StepCost
from pathsgd.paper.training.initial_network import make_network

SECONDS = 1.5
"""For each method."""


def measure_step_cost(study: Study, info: DataInfo, device: torch.device) -> StepCost:
    """Whole training steps, timed in turn."""
    if device.type == "cuda":
        allow_tf32(study.tf32)
    times, failed = time_training_steps(
        lambda: make_network(study.net, info.shape, study.hidden, info.classes),
        {
            "sgd": lambda model, x: torch.optim.SGD(model.parameters(), LR, fused=True),
            "path": lambda model, x: PathSGD(model, x, lr=LR),
        },
        torch.randn(study.batch, math.prod(info.shape), device=device),
        torch.randint(info.classes, (study.batch,), device=device),
        SECONDS,
    )
    for error in failed.values():
        raise error
    name = "-".join(map(str, (math.prod(info.shape), *study.hidden, info.classes)))
    threads = f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    return StepCost(name, device_name(device) + threads, times["sgd"].train, times["path"].train)
