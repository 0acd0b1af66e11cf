"""A relative step on a GPU as one CUDA graph: Python launches one kernel instead of hundreds.

Gradients are copied into tensors that stay where they are, rates are numbers on the device; everything else
that a step reads or writes must lie where it lay when the step was captured, or it is captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach, has_step_hooks
from pathsgd.geometry.cuda_graph import ERROR_MODE, CUDAGraph
from pathsgd.optim.relative.coordinates import RelativeMeasurement
from pathsgd.optim.relative.default_rate import KEY as RATE_STEPS


class CapturedStep:
    """One step of these parameters.

    Args:
        optimizer: that moves them.
        parameters: those that have a gradient.
        measurement: what is replayed before every step,
        coordinates: and the tensors that it writes.
        run: the step.
        point: tells the step where the gradients lie; without it they are copied.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        measurement: RelativeMeasurement,
        coordinates: object,
        run: Callable[[], object],
        point: Callable[[bool], None] | None = None,
    ) -> None:
        self.optimizer, self.parameters, self.run, self.point = optimizer, parameters, run, point
        self.measurement, self.coordinates = measurement, coordinates
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.rates = {
            k: torch.zeros((), dtype=dtype, device=parameters[0].device)
            for k, group in enumerate(optimizer.param_groups)
            if not isinstance(group["lr"], Tensor)
        }
        self.filled: list[float] = []
        self.grads = [] if point else [torch.empty_like(p.grad) for p in parameters if p.grad is not None]
        self.graph: CUDAGraph | None = None
        self.captured_at: list[object] = []

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these parameters, their state and their options are those of this step."""
        return self.captured_at == self._describe(parameters) and not has_step_hooks(self.optimizer)

    def replay(self) -> None:
        """The step. The first is run, which loads all kernels and makes all state; the second is captured."""
        self._copy_inputs()
        if not self.captured_at:
            with self.on_device():
                self.run()
            self.captured_at = self._describe(self.parameters)
            return
        if self.graph is None:
            self.graph = capture(self)
        self.graph.replay()
        torch.autograd.graph.increment_version(self.parameters)

    def _copy_inputs(self) -> None:
        if self.point is not None:
            self.point(self.graph is not None)
        else:
            foreach("copy_", self.grads, [p.grad for p in self.parameters])
        rates = [self.optimizer.param_groups[k]["lr"] for k in self.rates]
        if rates != self.filled:
            for rate, value in zip(self.rates.values(), rates, strict=True):
                rate.fill_(value)
            self.filled = rates

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, gradients are the copies, and rates and numbers of steps are on the device."""
        grads, groups = [p.grad for p in self.parameters], self.optimizer.param_groups
        before = [dict(group) for group in groups]
        try:
            for p, grad in zip(self.parameters, self.grads or grads, strict=True):
                p.grad = grad
                state = self.optimizer.state[p]
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(p.device)
            for k, group in enumerate(groups):
                group["lr"] = self.rates.get(k, group["lr"])
                if "capturable" in group:
                    group["capturable"] = True
            yield
        finally:
            for p, own in zip(self.parameters, grads, strict=True):
                p.grad = own
            for group, options in zip(groups, before, strict=True):
                group.update(options)

    def _describe(self, parameters: Sequence[Tensor]) -> list[object]:
        """All that the graph has taken for granted."""
        found: list[object] = [p.data_ptr() for p in parameters]
        states = self.optimizer.state
        found += [
            value.data_ptr() if isinstance(value, Tensor) else value
            for p in parameters
            for value in states[p].values()
        ]
        if self.point is not None:
            grads = [p.grad for p in parameters]
            found += [
                g.stride() if g is not None and g.layout is torch.strided and g.dtype is p.dtype else None
                for p, g in zip(parameters, grads, strict=True)
            ]
        for group in self.optimizer.param_groups:
            found.append(isinstance(group["lr"], Tensor) or group["lr"] != 0)
            found += [
                (name, value.data_ptr() if isinstance(value, Tensor) else value)
                for name, value in group.items()
                if name not in ("params", "initial_lr", RATE_STEPS)
                and (name != "lr" or isinstance(value, Tensor))
            ]
        return found


def capture(step: CapturedStep) -> CUDAGraph:
    """The step as a CUDA graph; nothing is moved yet."""
    graph = CUDAGraph()
    with step.on_device(), torch.cuda.graph(graph, capture_error_mode=ERROR_MODE):
        step.run()
    return graph


def is_capturable(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether a step of the optimizer can be captured: on one GPU, and nothing of it happens in Python."""
    device = parameters[0].device
    known = getattr(optimizer, "runs_on_device", False) or isinstance(optimizer, torch.optim.Adam)
    return (
        known
        and device.type == "cuda"
        and all(p.device == device and p.grad is not None and not p.grad.is_sparse for p in parameters)
        and not any(
            group.get("differentiable") or (isinstance(group["lr"], Tensor) and group["lr"].device != device)
            for group in optimizer.param_groups
        )
        and not has_step_hooks(optimizer)
    )
