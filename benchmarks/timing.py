"""Medians of the time of a step: several are timed in turn; on a GPU a step can be a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Step = Callable[[], object]
LR = 1e-30
"""So small that no weight changes: a network that diverges would be timed on NaNs."""
MIN_SAMPLES = 3
"""Samples of a median, however long they take."""
MIN_SAMPLE_US, MAX_REPEATS = 1e5, 20
"""On a GPU, how long a sample should take, and how many steps it has at most."""
WARM_UP_STEPS = 8
"""Steps on a GPU, after which optimizers have captured what they replay."""


def median_us(steps: Mapping[str, Step], seconds: float, device: torch.device) -> dict[str, float]:
    """Returns the median time of each step in microseconds, each timed for about ``seconds``.

    They are taken in turn, so that a drift of the machine affects all alike.
    """
    repeats = dict.fromkeys(steps, 1)
    for name, step in steps.items():
        for _ in range(WARM_UP_STEPS if device.type == "cuda" else 1):
            step()
        if device.type == "cuda":
            repeats[name] = max(1, min(MAX_REPEATS, int(MIN_SAMPLE_US / _time_us(step, device, 1))))
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds * len(steps)
    while steps and (time.perf_counter() < end or len(next(iter(times.values()))) < MIN_SAMPLES):
        for name, step in steps.items():
            times[name].append(_time_us(step, device, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _time_us(step: Step, device: torch.device, repeats: int) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats * 1e3


def capture(step: Step, pool: Any = None) -> Step:
    """Captures a step as a CUDA graph, after four steps of warm-up, and returns its replay. Graphs that do
    not run at the same time may share a pool of memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph.replay


def device_name(device: torch.device) -> str:
    """Returns the model of a GPU, or CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
