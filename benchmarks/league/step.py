"""One step of training; on a GPU as one CUDA graph, so that small networks do not wait for Python."""

from __future__ import annotations

import torch
from torch import nn

from .tasks import Batch, Task

WARM_UP = 6
"""Steps before one is captured: optimizers make their state in the first."""


class TrainingStep:
    """Forward, backward and the optimizer's step, at a factor of the optimizer's own rates; with None at the
    rates as the optimizer leaves them."""

    def __init__(self, model: nn.Module, task: Task, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.task, self.optimizer = model, task, optimizer
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.total = torch.zeros((), device=next(model.parameters()).device)
        """The sum of the losses."""

    def __call__(self, batch: Batch, factor: float | None) -> None:
        if factor is not None:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
        self.run(batch)

    def run(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.total += loss.detach()


class CapturedStep(TrainingStep):
    """The same, replayed; the rates are tensors that the graph reads."""

    def __init__(self, model: nn.Module, task: Task, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, task, optimizer)
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = torch.tensor(rate, device=self.total.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream()
        self.steps = 0
        self.batch: Batch = ()

    def __call__(self, batch: Batch, factor: float | None) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"].fill_(rate if factor is None else rate * factor)
        if self.graph is not None:
            for place, tensor in zip(self.batch, batch, strict=True):
                place.copy_(tensor)
            self.graph.replay()
            return
        self.steps += 1
        if self.steps <= WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.run(batch)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        self.batch = tuple(tensor.clone() for tensor in batch)
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.run(self.batch)
        self.graph.replay()
