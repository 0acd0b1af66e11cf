"""Time of a training step with Path-SGD and with SGD, on a study's network."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pathsgd import PathSGD
from study.config import Study
from study.manifest import device_name
from study.results import DataInfo, StepCost
from study.training import make_network

SECONDS = 3.0
LR = 1e-30
"""So small that no weight changes: a network that diverges would be timed on NaNs."""
WARM_UP_STEPS = 8
CPU_ROUNDS = 3
"""Rounds with new models: where one happens to lie in memory can cost a third of its speed."""
STEPS_PER_SAMPLE = 20
"""Steps on a GPU between two synchronisations."""


def measure_step_cost(study: Study, info: DataInfo, device: torch.device) -> StepCost:
    """Times whole training steps of both methods in turn; on a GPU they are captured in CUDA graphs."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = study.tf32
    widths = math.prod(info.shape), *study.hidden, info.classes
    x = torch.randn(study.batch, widths[0], device=device)
    y = torch.randint(info.classes, (study.batch,), device=device)
    rounds = 1 if x.is_cuda else CPU_ROUNDS
    times: dict[str, list[float]] = {"sgd": [], "path": []}
    for _ in range(rounds):
        steps = {name: _make_step(name, make_network(*widths).to(device), x, y) for name in times}
        end = time.monotonic() + SECONDS / rounds
        while time.monotonic() < end or len(times["path"]) < 3:
            for name, step in steps.items():
                times[name].append(_time(step, device))
    threads = f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    medians = statistics.median(times["sgd"]), statistics.median(times["path"])
    return StepCost("-".join(map(str, widths)), device_name(device) + threads, *medians)


def _make_step(name: str, model: nn.Sequential, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), LR, fused=True) if name == "sgd" else PathSGD(model, x[:1], lr=LR)
    )

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    if not x.is_cuda:
        step()
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.optimizer = optimizer  # type: ignore[attr-defined]  # a graph does not keep what it works on
    return graph.replay


def _time(step: Callable[[], None], device: torch.device) -> float:
    """Microseconds of a step."""
    count = STEPS_PER_SAMPLE if device.type == "cuda" else 1
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6
