"""One network, one batch, several methods: the whole training step and the optimizer's step alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pathsgd.bench.methods import BASELINE, HEAVY, METHODS, Stepper
from pathsgd.console.devices import allow_tf32
from pathsgd.console.timing import Step, capture, median_us

ROUNDS = 3
"""On a CPU, with new models each time: where one happens to lie in memory can cost a third of its speed."""


@dataclass(frozen=True)
class Setting:
    """What is trained, on what."""

    net: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the input, batch first."""
    classes: int = 10
    tf32: bool = False
    study: str = "networks"
    """Which table or panel it belongs to."""
    at: float = math.nan
    """Its place on the panel's axis."""


@dataclass(frozen=True)
class Row:
    """Times in microseconds."""

    study: str
    net: str
    at: float
    batch: int
    tf32: bool
    method: str
    train_us: float
    step_us: float
    eager_us: float
    floor_us: float
    ratio: float
    """Of the whole training step, to that of fused SGD."""


class Times(NamedTuple):
    """Of one method, in microseconds: the whole training step, and the optimizer's captured and eager."""

    train: float
    step: float
    eager: float


def measure(
    setting: Setting, methods: Sequence[str], seconds: float, speed: float, device: torch.device
) -> tuple[list[Row], list[str]]:
    """The rows, and what could not be measured and why. ``speed`` is the memory's, in bytes per us."""
    rounds = 1 if device.type == "cuda" else ROUNDS
    timed = [_time_methods(setting, methods, seconds / rounds, device) for _ in range(rounds)]
    found, failed = timed[0]
    times = {
        name: Times(*(statistics.median(each[name][k] for each, _ in timed) for k in range(3)))
        for name in found
    }
    floor = 3 * 4 * sum(p.numel() for p in setting.make().parameters()) / speed
    rows = [
        Row(
            setting.study, setting.net, setting.at, setting.shape[0], setting.tf32, name, *own, floor,
            own.train / times[BASELINE].train,
        )
        for name, own in times.items()
    ]  # fmt: skip
    return rows, failed


def _time_methods(
    setting: Setting, methods: Sequence[str], seconds: float, device: torch.device
) -> tuple[dict[str, Times], list[str]]:
    """The times of one set of models, and what failed."""
    x = torch.randn(setting.shape, device=device)
    y = torch.randint(setting.classes, (len(x),), device=device)
    steps: dict[str, tuple[Step, Step, Step]] = {}
    alive: list[object] = []  # a captured graph does not keep what it works on
    failed = []
    allow_tf32(setting.tf32)
    for name in methods:
        torch.manual_seed(0)
        model = setting.make().to(device)
        try:
            optimizer = METHODS[name](model, x[:1])
            if optimizer is None:
                continue
            alive.append((model, optimizer))
            backward, train = _training_steps(model, optimizer, x, y)
            train()
            captured_train = capture(train, device)
            backward()
            steps[name] = captured_train, capture(optimizer.step, device), optimizer.step
        except (RuntimeError, ValueError) as error:
            failed.append(f"{setting.net}: {name}: {str(error).splitlines()[0][:90]}")
    light = {name: own[0] for name, own in steps.items() if name not in HEAVY}
    heavy = {name: own[0] for name, own in steps.items() if name in HEAVY}
    train_us = median_us(light, seconds, device) | median_us(heavy, seconds, device)
    step_us = median_us({name: own[1] for name, own in steps.items()}, seconds / 4, device)
    eager_us = step_us
    if device.type == "cuda":
        eager_us = median_us({name: own[2] for name, own in steps.items()}, seconds / 4, device)
    return {name: Times(train_us[name], step_us[name], eager_us[name]) for name in train_us}, failed


def _training_steps(model: nn.Module, optimizer: Stepper, x: Tensor, y: Tensor) -> tuple[Step, Step]:
    def backward() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        nn.functional.cross_entropy(model(x), y).backward()

    def train() -> None:
        backward()
        optimizer.step()

    return backward, train
