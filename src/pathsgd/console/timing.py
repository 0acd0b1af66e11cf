"""The time of a training step: methods taken in turn, medians; on a GPU steps are captured in CUDA graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

Step = Callable[[], object]
LR = 1e-30
"""So small that no weight changes: a network that diverges would be timed on NaNs."""
MIN_SAMPLES = 3
"""Of a median, however long they take."""
CPU_ROUNDS = 3
"""With new models each time: where one happens to lie in memory can cost a third of its speed."""


class Stepper(Protocol):
    """The part of an optimizer that is timed."""

    def step(self) -> object: ...


MakeOptimizer = Callable[[nn.Module, Tensor], Stepper | None]
"""(model, input) -> an optimizer, or None where the method does not apply."""


class StepTimes(NamedTuple):
    """In microseconds: the whole training step, and the optimizer's step captured and eager."""

    train: float
    step: float
    eager: float


def time_training_steps(
    make_model: Callable[[], nn.Module],
    methods: Mapping[str, MakeOptimizer],
    x: Tensor,
    y: Tensor,
    seconds: float,
    alone: Sequence[str] = (),
) -> tuple[dict[str, StepTimes], dict[str, Exception]]:
    """Times each method, on networks of its own, for about ``seconds``.

    Methods in ``alone`` are not timed in turn with the others: they heat the machine, and clocks go down for
    all that is timed beside them.

    Returns:
        The times by method, and the exceptions of those that failed.
    """
    rounds = 1 if x.is_cuda else CPU_ROUNDS
    failed: dict[str, Exception] = {}
    times: dict[str, list[StepTimes]] = {}
    for _ in range(rounds):
        steps = {}
        for name, make_optimizer in methods.items():
            torch.manual_seed(0)
            try:
                steps[name] = _prepare(make_model().to(x.device), make_optimizer, x, y)
            except (RuntimeError, ValueError) as error:
                failed[name] = error
        for name, own in _time_in_turn(steps, seconds / rounds, x.device, alone).items():
            times.setdefault(name, []).append(own)
    medians = {
        name: StepTimes(*map(statistics.median, zip(*own, strict=True)))
        for name, own in times.items()
        if name not in failed
    }
    return medians, failed


class _Steps(NamedTuple):
    train: Step
    step: Step
    eager: Step
    works_on: object
    """A captured graph does not keep it."""


def _prepare(model: nn.Module, make_optimizer: MakeOptimizer, x: Tensor, y: Tensor) -> _Steps | None:
    optimizer = make_optimizer(model, x[:1])
    if optimizer is None:
        return None

    def backward() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        nn.functional.cross_entropy(model(x), y).backward()

    def train() -> None:
        backward()
        optimizer.step()

    train()
    captured = capture(train, x.device)
    backward()
    return _Steps(captured, capture(optimizer.step, x.device), optimizer.step, (model, optimizer))


def _time_in_turn(
    prepared: Mapping[str, _Steps | None], seconds: float, device: torch.device, alone: Sequence[str]
) -> dict[str, StepTimes]:
    steps = {name: own for name, own in prepared.items() if own is not None}
    together = {name: own.train for name, own in steps.items() if name not in alone}
    apart = {name: own.train for name, own in steps.items() if name in alone}
    train = median_us(together, seconds, device) | median_us(apart, seconds, device)
    step = median_us({name: own.step for name, own in steps.items()}, seconds / 4, device)
    eager = step
    if device.type == "cuda":
        eager = median_us({name: own.eager for name, own in steps.items()}, seconds / 4, device)
    return {name: StepTimes(train[name], step[name], eager[name]) for name in train}


def median_us(steps: Mapping[str, Step], seconds: float, device: torch.device) -> dict[str, float]:
    """The median time of each in microseconds, in turn, so that a drift of the machine affects all alike."""
    for step in steps.values():
        for _ in range(3 if device.type == "cuda" else 1):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds * len(steps)
    while steps and (time.perf_counter() < end or len(next(iter(times.values()))) < MIN_SAMPLES):
        for name, step in steps.items():
            times[name].append(_time(step, device))
    return {name: statistics.median(values) for name, values in times.items()}


def _time(step: Step, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20 * 1e3


def capture(step: Step, device: torch.device) -> Step:
    """On a GPU the step captured as a CUDA graph, after four steps of warm-up."""
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def bytes_per_us(device: torch.device) -> float:
    """The bandwidth of a copy, read and write together."""
    source = torch.empty(1 << 26, device=device)
    target = torch.empty_like(source)
    (taken,) = median_us({"copy": lambda: target.copy_(source)}, 0.5, device).values()
    return 2 * source.numel() * 4 / taken
