"""One network, one batch, several methods: the whole training step and the optimizer's step alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pathsgd.bench.methods import BASELINE, HEAVY, METHODS, Steps
from pathsgd.console.machine import allow_tf32
from pathsgd.console.timing import Run, captured, median_us


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


def measure(
    setting: Setting, methods: Sequence[str], seconds: float, speed: float, device: torch.device
) -> tuple[list[Row], list[str]]:
    """The rows, and what could not be measured and why. ``speed`` is the memory's, in bytes per us."""
    rounds = 1 if device.type == "cuda" else ROUNDS
    found = [_round(setting, methods, seconds / rounds, device) for _ in range(rounds)]
    count = sum(p.numel() for p in setting.make().parameters())
    train = {name: statistics.median(r.train[name] for r in found) for name in found[0].train}
    rows = [
        Row(
            setting.study, setting.net, setting.at, setting.shape[0], setting.tf32, name, train[name],
            statistics.median(r.step[name] for r in found), statistics.median(r.eager[name] for r in found),
            3 * 4 * count / speed, train[name] / train[BASELINE],
        )
        for name in train
    ]  # fmt: skip
    return rows, found[0].failed


ROUNDS = 3
"""On a CPU, with models made anew: where a model happens to lie in memory can cost a third of its speed."""


@dataclass(frozen=True)
class _Round:
    """The times of one set of models."""

    train: dict[str, float]
    step: dict[str, float]
    eager: dict[str, float]
    failed: list[str]


def _round(setting: Setting, methods: Sequence[str], seconds: float, device: torch.device) -> _Round:
    x = torch.randn(setting.shape, device=device)
    y = torch.randint(setting.classes, (len(x),), device=device)
    whole: dict[str, Run] = {}
    alone: dict[str, Run] = {}
    eager: dict[str, Run] = {}
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
            backward, train = _steps(model, optimizer, x, y)
            train()
            whole[name] = captured(train, device)
            backward()
            alone[name] = captured(optimizer.step, device)
            eager[name] = optimizer.step
        except (RuntimeError, ValueError) as error:
            whole.pop(name, None)
            failed.append(f"{setting.net}: {name}: {str(error).splitlines()[0][:90]}")
    # What heats the machine is timed by itself: clocks go down for all that is timed beside it.
    took = median_us({name: run for name, run in whole.items() if name not in HEAVY}, seconds, device)
    took |= median_us({name: run for name, run in whole.items() if name in HEAVY}, seconds, device)
    steps = median_us({name: alone[name] for name in whole}, seconds / 4, device)
    eagerly = steps
    if device.type == "cuda":
        eagerly = median_us({name: eager[name] for name in whole}, seconds / 4, device)
    return _Round(took, steps, eagerly, failed)


def _steps(model: nn.Module, optimizer: Steps, x: Tensor, y: Tensor) -> tuple[Run, Run]:
    def backward() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        nn.functional.cross_entropy(model(x), y).backward()

    def train() -> None:
        backward()
        optimizer.step()

    return backward, train
