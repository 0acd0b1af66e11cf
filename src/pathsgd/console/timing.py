"""The time of a training step: methods taken in turn, medians; on a GPU steps are captured in CUDA graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

Step = Callable[[], object]
Pool = Any  # torch has no public name for it
LR = 1e-30
"""So small that no weight changes: a network that diverges would be timed on NaNs."""
MIN_SAMPLES = 3
"""Of a median, however long they take."""
SAMPLE_US, MOST_REPEATS = 1e5, 20
"""On a GPU, how long a sample is to take, and how many steps it has at most."""
WARM_UP = 8
"""Steps on a GPU, after which optimizers have captured what they replay."""
CPU_ROUNDS = 3
"""With new models each time: where one happens to lie in memory can cost a third of its speed."""


class Stepper(Protocol):
    """The part of an optimizer that is timed."""

    def step(self) -> object: ...


MakeOptimizer = Callable[[nn.Module, Tensor], Stepper | None]
"""(model, input) -> an optimizer, or None where the method does not apply."""


class StepTimes(NamedTuple):
    """In microseconds: the whole training step and the optimizer's, captured, and both again in a loop."""

    train: float
    step: float
    eager: float
    loop: float


def time_training_steps(
    make_model: Callable[[], nn.Module],
    methods: Mapping[str, MakeOptimizer],
    x: Tensor,
    y: Tensor,
    seconds: float,
    alone: Sequence[str] = (),
    autocast: bool = False,
    compiled: bool = False,
) -> tuple[dict[str, StepTimes], dict[str, Exception]]:
    """Times each method, on networks of its own, for about ``seconds``.

    Methods in ``alone`` are not timed in turn with the others: they heat the machine, and clocks go down for
    all that is timed beside them. ``autocast`` is to bf16, ``compiled`` by torch.compile.

    Returns:
        The times by method, and the exceptions of those that failed.
    """
    rounds = 1 if x.is_cuda else CPU_ROUNDS
    pool = torch.cuda.graph_pool_handle() if x.is_cuda else None  # no two graphs run at a time
    failed: dict[str, Exception] = {}
    times: dict[str, list[StepTimes]] = {}
    for _ in range(rounds):
        steps = {}
        for name, make_optimizer in methods.items():
            torch.manual_seed(0)
            try:
                steps[name] = _prepare(
                    make_model().to(x.device), make_optimizer, x, y, autocast, compiled, pool
                )
            except (RuntimeError, ValueError) as error:
                failed[name] = error.with_traceback(None)  # whose frames would keep the network
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
    loop: Step
    works_on: object
    """A captured graph does not keep it."""


def _prepare(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    x: Tensor,
    y: Tensor,
    autocast: bool,
    compiled: bool,
    pool: Pool | None,
) -> _Steps | None:
    forward: nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]
    optimizer = make_optimizer(forward, x[:1])
    if optimizer is None:
        return None

    def backward() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            outputs = forward(x)
            loss = nn.functional.cross_entropy(outputs.flatten(0, -2), y.flatten())
        loss.backward()

    def train() -> None:
        backward()
        optimizer.step()

    train()
    captured = capture(train, x.device, pool)
    backward()
    step = capture(optimizer.step, x.device, pool)
    grads = [parameter.grad for parameter in model.parameters()]
    return _Steps(captured, step, optimizer.step, train, (model, optimizer, grads))


def _time_in_turn(
    prepared: Mapping[str, _Steps | None], seconds: float, device: torch.device, alone: Sequence[str]
) -> dict[str, StepTimes]:
    steps = {name: own for name, own in prepared.items() if own is not None}
    together = {name: own.train for name, own in steps.items() if name not in alone}
    apart = {name: own.train for name, own in steps.items() if name in alone}
    train = median_us(together, seconds, device) | median_us(apart, seconds, device)
    step = median_us({name: own.step for name, own in steps.items()}, seconds / 4, device)
    eager, loop = step, train
    if device.type == "cuda":
        eager = median_us({name: own.eager for name, own in steps.items()}, seconds / 4, device)
        # Last: from here on gradients lie elsewhere.
        loop = median_us({name: own.loop for name, own in steps.items()}, seconds / 4, device)
    return {name: StepTimes(train[name], step[name], eager[name], loop[name]) for name in train}


def median_us(steps: Mapping[str, Step], seconds: float, device: torch.device) -> dict[str, float]:
    """The median time of each in microseconds, in turn, so that a drift of the machine affects all alike."""
    repeats = dict.fromkeys(steps, 1)
    for name, step in steps.items():
        for _ in range(WARM_UP if device.type == "cuda" else 1):
            step()
        if device.type == "cuda":
            repeats[name] = max(1, min(MOST_REPEATS, int(SAMPLE_US / _time(step, device, 1))))
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds * len(steps)
    while steps and (time.perf_counter() < end or len(next(iter(times.values()))) < MIN_SAMPLES):
        for name, step in steps.items():
            times[name].append(_time(step, device, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _time(step: Step, device: torch.device, repeats: int) -> float:
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


def capture(step: Step, device: torch.device, pool: Pool | None = None) -> Step:
    """On a GPU the step captured as a CUDA graph, after four steps of warm-up. Graphs that do not run at the
    same time may share a pool of memory."""
    if device.type != "cuda":
        return step
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


def bytes_per_us(device: torch.device) -> float:
    """The bandwidth of a copy, read and write together."""
    source = torch.empty(1 << 26, device=device)
    target = torch.empty_like(source)
    (taken,) = median_us({"copy": lambda: target.copy_(source)}, 0.5, device).values()
    return 2 * source.numel() * 4 / taken
