"""One step of training; on a GPU as one CUDA graph, so that small networks do not wait for Python."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WARM_UP = 6
"""Steps before one is captured: optimizers make their state in the first."""


class TrainingStep:
    """Forward, backward and the optimizer's step, at a factor of the optimizer's own rates."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.total = torch.zeros((), device=next(model.parameters()).device)
        """The sum of the losses."""

    def __call__(self, x: Tensor, y: Tensor, factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.run(x, y)

    def run(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
        loss.backward()
        self.optimizer.step()
        self.total += loss.detach()


class CapturedStep(TrainingStep):
    """The same, replayed; the rates are tensors that the graph reads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = torch.tensor(rate, device=self.total.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream()
        self.steps = 0

    def __call__(self, x: Tensor, y: Tensor, factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"].fill_(rate * factor)
        if self.graph is not None:
            self.x.copy_(x)
            self.y.copy_(y)
            self.graph.replay()
            return
        self.steps += 1
        if self.steps <= WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.run(x, y)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        self.x, self.y = x.clone(), y.clone()
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.run(self.x, self.y)
        self.graph.replay()
