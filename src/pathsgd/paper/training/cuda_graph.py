"""Training steps as CUDA graphs, and streams for runs that share a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pathsgd.paper.training.trainer import Trainer

CAPTURE_LOCK = threading.Lock()
"""One thread captures at a time: torch keeps global state meanwhile."""
MOST_STEPS = 20
"""Steps in a graph. Each replay copies the state of the random generator: with dropout an epoch of Adam on an
H200 took 0.404 s with one step in a graph, 0.398 with twenty."""
_FREE_STREAMS: dict[torch.device, list[tuple[torch.cuda.Stream, torch.cuda.Stream]]] = {}
_STREAM_LOCK = threading.Lock()


@contextmanager
def use_own_streams(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Inside, work goes to a stream that no other run uses. Gives another stream to capture steps on.

    Two runs at a time must not capture on the same stream: cuBLAS keeps one workspace for each thread and
    stream, and the backward pass of all runs is one thread. Replayed side by side, steps captured on one
    stream would overwrite each other's sums.
    """
    if device.type != "cuda":
        yield None
        return
    with _STREAM_LOCK:
        free = _FREE_STREAMS.setdefault(device, [])
        # torch reuses its 32 streams of each priority in turn; nothing else takes those of high priority.
        pair = free.pop() if free else (torch.cuda.Stream(device, -1), torch.cuda.Stream(device, -1))
    current, capture_stream = pair
    try:
        current.wait_stream(torch.cuda.current_stream(device))  # it may still be copying the data
        with torch.cuda.stream(current):
            yield capture_stream
    finally:
        with _STREAM_LOCK:
            free.append(pair)


class CapturedSteps:
    """Some steps of a trainer as one CUDA graph."""

    def __init__(self, trainer: Trainer) -> None:
        device, batch = trainer.device, trainer.run.batch
        self.steps = trainer.steps
        self.steps_per_replay = max(k for k in range(1, MOST_STEPS + 1) if self.steps % k == 0)
        self.points = torch.zeros(len(trainer.outputs), dtype=torch.int64, device=device)
        self.first_batch = torch.arange(batch, device=device)
        self.places = self.first_batch.clone()

        def step() -> None:
            trainer.step(self.points[self.places], self.places)
            self.places += batch

        with CAPTURE_LOCK:
            stream = trainer.capture_stream or torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                _warm_up(trainer, step, lambda: self.places.copy_(self.first_batch))
            torch.cuda.current_stream(device).wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(trainer.dropout_generator)
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(self.steps_per_replay):
                    step()

    def train_epoch(self, points: Tensor) -> None:
        self.points.copy_(points)
        self.places.copy_(self.first_batch)
        for _ in range(self.steps // self.steps_per_replay):
            self.graph.replay()


def _warm_up(trainer: Trainer, step: Callable[[], None], rewind: Callable[[], object]) -> None:
    """A few steps at learning rate 0; what they leave in the optimizer's state is restored."""
    groups = trainer.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    generator_state = trainer.dropout_generator.get_state()
    before = _copy_state(trainer.optimizer)
    for group in groups:
        group["lr"] = 0.0
    for _ in range(4):
        rewind()
        step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    _restore_state(trainer.optimizer, before)
    trainer.dropout_generator.set_state(generator_state)


def _copy_state(optimizer: Any) -> dict[Any, dict[str, Any]]:
    return {
        p: {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        for p, state in optimizer.state.items()
    }


@torch.no_grad()
def _restore_state(optimizer: Any, before: dict[Any, dict[str, Any]]) -> None:
    """In place, since kernels keep addresses of the state. What was not there before becomes zero."""
    for p, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                old = before.get(p, {}).get(name)
                value.copy_(old) if isinstance(old, Tensor) else value.zero_()
