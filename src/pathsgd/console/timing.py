"""Timing: methods taken in turn, medians; on a GPU steps are captured in CUDA graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Step = Callable[[], object]
MIN_SAMPLES = 3
"""Of a median, however long they take."""


def median_us(runs: dict[str, Step], seconds: float, device: torch.device) -> dict[str, float]:
    """The median time of each in microseconds, in turn, so that a drift of the machine affects all alike."""
    for run in runs.values():
        for _ in range(3 if device.type == "cuda" else 1):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds * len(runs)
    while runs and (time.perf_counter() < end or len(next(iter(times.values()))) < MIN_SAMPLES):
        for name, run in runs.items():
            times[name].append(_time(run, device))
    return {name: statistics.median(values) for name, values in times.items()}


def _time(run: Step, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20 * 1e3


def capture(run: Step, device: torch.device) -> Step:
    """On a GPU the step captured as a CUDA graph, after four steps of warm-up."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def bytes_per_us(device: torch.device) -> float:
    """The bandwidth of a copy, read and write together."""
    source = torch.empty(1 << 26, device=device)
    target = torch.empty_like(source)
    (taken,) = median_us({"copy": lambda: target.copy_(source)}, 0.5, device).values()
    return 2 * source.numel() * 4 / taken
