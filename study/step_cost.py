"""Time of a training step with Path-SGD and with SGD, on a study's network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from pathsgd import PathSGD
from study.config import Study
from study.manifest import device_name
from study.runs import DataInfo, StepCost
from study.training import make_network

SECONDS = 1.5  # time for each method
LR = 1e-30  # so small that no weight changes: a network that diverges would be timed on NaNs
WARM_UP_STEPS = 8
ROUNDS = 3
"""Rounds in which the methods take turns, with new models: where one lies in memory can cost a third of its
speed."""


def measure_step_cost(study: Study, info: DataInfo, device: torch.device) -> StepCost:
    """Times whole training steps; on a GPU they are captured in CUDA graphs."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = study.tf32
    widths = math.prod(info.shape), *study.hidden, info.classes
    x = torch.randn(study.batch, widths[0], device=device)
    y = torch.randint(info.classes, (study.batch,), device=device)
    times: dict[str, list[float]] = {"sgd": [], "path": []}
    threads = torch.get_num_threads()
    for _ in range(ROUNDS):
        for name, values in times.items():
            step = _make_step(name, make_network(*widths).to(device), x, y)
            timer = Timer("step()", globals={"step": step}, num_threads=threads)
            values.append(1e6 * timer.blocked_autorange(min_run_time=SECONDS / ROUNDS).median)
    medians = statistics.median(times["sgd"]), statistics.median(times["path"])
    machine = device_name(device) + (f", threads: {threads}" if device.type == "cpu" else "")
    return StepCost("-".join(map(str, widths)), machine, *medians)


def _make_step(name: str, model: nn.Sequential, x: Tensor, y: Tensor) -> Callable[[], object]:
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
    with torch.cuda.graph(graph, stream=stream):
        step()
    return lambda: (optimizer, graph.replay())  # a graph does not keep what it works on
