"""One network, one batch, several methods: the whole training step and the optimizer's step alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pathsgd.bench.methods import BASELINE, HEAVY, METHODS
from pathsgd.console.devices import allow_tf32
from pathsgd.console.timing import time_training_steps


@dataclass(frozen=True)
class Setting:
    """What is trained, on what."""

    net: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the input, batch first."""
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
    allow_tf32(setting.tf32)
    x = torch.randn(setting.shape, device=device)
    y = torch.randint(10, (len(x),), device=device)
    chosen = {name: METHODS[name] for name in methods}
    times, failed = time_training_steps(setting.make, chosen, x, y, seconds, alone=HEAVY)
    floor = 3 * 4 * sum(p.numel() for p in setting.make().parameters()) / speed
    rows = [
        Row(
            setting.study, setting.net, setting.at, len(x), setting.tf32, name, *own, floor,
            own.train / times[BASELINE].train,
        )
        for name, own in times.items()
    ]  # fmt: skip
    return rows, [f"{setting.net}: {name}: {str(e).splitlines()[0][:90]}" for name, e in failed.items()]
