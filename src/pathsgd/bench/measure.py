"""One network, one batch, several methods: the whole training step and the optimizer's step alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pathsgd import trace
from pathsgd.bench.methods import HEAVY, METHODS
from pathsgd.console.devices import allow_tf32
from pathsgd.console.timing import MakeOptimizer, time_training_steps


@dataclass(frozen=True)
class Setting:
    """What is trained, on what."""

    net: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the input, batch first."""
    precision: str = "fp32"
    """Or "tf32"; or "bf16", by autocast."""
    tokens: int = 0
    """How many there are, if inputs are tokens; 0 for images and points."""
    channels_last: bool = False
    compiled: bool = False
    """Whether the network is compiled by torch.compile."""
    study: str = "networks"
    """Which table or panel it belongs to."""
    at: float = math.nan
    """Its place on the panel's axis."""
    methods: tuple[str, ...] = tuple(METHODS)


@dataclass(frozen=True)
class Row:
    """Times in microseconds."""

    study: str
    net: str
    at: float
    batch: int
    precision: str
    method: str
    train_us: float
    """The whole training step; on a GPU as one CUDA graph."""
    step_us: float
    """The optimizer's step alone, likewise."""
    eager_us: float
    """The same, in a loop of Python."""
    loop_us: float
    """The whole training step, in a loop of Python."""
    floor_us: float
    ratio: float
    """Of train_us to that of torch's optimizer of the same kind."""


def measure(
    setting: Setting, methods: Sequence[str], seconds: float, speed: float, device: torch.device
) -> tuple[list[Row], list[str]]:
    """The rows, and what could not be measured and why. ``speed`` is the memory's, in bytes per us."""
    allow_tf32(setting.precision != "fp32")
    if setting.tokens:
        x = torch.randint(setting.tokens, setting.shape, device=device)
        y = torch.randint(setting.tokens, setting.shape, device=device)
    else:
        x, y = torch.randn(setting.shape, device=device), torch.randint(10, setting.shape[:1], device=device)
    if setting.channels_last:
        x = x.to(memory_format=torch.channels_last)

    def make() -> nn.Module:
        model = setting.make()
        if setting.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    model = make()
    floor = 3 * 4 * sum(p.numel() for p in model.parameters()) / speed
    graph = trace(model.to(device), x[:1])  # once: it takes longer than the steps

    def with_graph(name: str) -> MakeOptimizer:
        return lambda model, x: METHODS[name].make(model, graph)

    times, failed = time_training_steps(
        make, {name: with_graph(name) for name in methods}, x, y, seconds, alone=HEAVY,
        autocast=setting.precision == "bf16", compiled=setting.compiled,
    )  # fmt: skip
    rows = [
        Row(
            setting.study, setting.net, setting.at, len(x), setting.precision, name, *own, floor,
            own.train / times[METHODS[name].beside].train if METHODS[name].beside in times else math.nan,
        )
        for name, own in times.items()
    ]  # fmt: skip
    return rows, [f"{setting.net}: {name}: {str(e).splitlines()[0][:90]}" for name, e in failed.items()]
