"""Training steps on a GPU as one CUDA graph that is replayed for every batch of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from study.training import Trainer

WARM_UP_STEPS = 4


class CapturedStep:
    """One step of a trainer: gathers its batch, trains on it and advances to the next."""

    def __init__(self, trainer: Trainer) -> None:
        device, batch = trainer.device, trainer.run.batch
        self.steps = trainer.steps
        self.points = torch.zeros(len(trainer.outputs), dtype=torch.int64, device=device)
        self.first_batch = torch.arange(batch, device=device)
        self.places = self.first_batch.clone()

        def step() -> None:
            trainer.step(self.points[self.places], self.places)
            self.places += batch

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._warm_up(trainer, step)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(trainer.dropout_generator)
        with torch.cuda.graph(self.graph, stream=stream):
            step()

    def train_epoch(self, points: Tensor) -> None:
        self.points.copy_(points)
        self.places.copy_(self.first_batch)
        for _ in range(self.steps):
            self.graph.replay()

    def _warm_up(self, trainer: Trainer, step: Any) -> None:
        """Takes a few steps at learning rate 0, and restores what they leave in the optimizer's state."""
        optimizer = trainer.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        generator_state = trainer.dropout_generator.get_state()
        before = {
            p: {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
            for p, state in optimizer.state.items()
        }
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(WARM_UP_STEPS):
            self.places.copy_(self.first_batch)
            step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        with torch.no_grad():
            # In place, since kernels keep addresses of the state. What was not there before becomes zero.
            for p, state in optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        old = before.get(p, {}).get(name)
                        value.zero_() if old is None else value.copy_(old)
        trainer.dropout_generator.set_state(generator_state)
