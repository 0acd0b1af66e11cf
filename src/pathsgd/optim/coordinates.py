"""Parameters as ``z = w sqrt(gamma)``, gamma held fixed, around the step of any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pathsgd.errors import PathError
from pathsgd.geometry.gamma import Gamma
from pathsgd.geometry.sharded import place_gradients

Limit = Callable[[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]
"""Shortens the steps of z of these parameters, which were at these weights."""


class InvariantView:
    """Parameters that hold z, and h as their gradient, inside :meth:`entered`.

    In place, on the same Parameters. Two copies are held meanwhile, one of the weights and one of the
    gradients.
    """

    def __init__(
        self, parameters: list[tuple[Tensor, Gamma]], fallback: list[Tensor], limit: Limit | None
    ) -> None:
        self.parameters = parameters
        self.fallback = fallback
        self.limit = limit
        self.start: list[Tensor] = []
        self.grads: list[Tensor | None] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On an error everything is put back, parameters that fall back included."""
        self.start = [p.detach().clone() for p, _ in self.parameters]
        fallback = [p.detach().clone() for p in self.fallback]
        self.grads = [p.grad for p, _ in self.parameters]
        try:
            for p, gamma in self.parameters:
                _write(p, gamma.weight_to_z(_compute_dtype(p, gamma)))
            self._check_range()
            self._gradients_to_z()
            yield
        except BaseException:
            for p, value in zip([p for p, _ in self.parameters], self.start, strict=True):
                _write(p, value)
            for p, value in zip(self.fallback, fallback, strict=True):
                p.data.copy_(value)
            raise
        else:
            self._write_weights()
        finally:
            for (p, _), grad in zip(self.parameters, self.grads, strict=True):
                p.grad = grad

    def wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure as a function of z: evaluated at the weights z stands for, its gradient as h."""

        def evaluate() -> Any:
            here = [p.detach().clone() for p, _ in self.parameters]
            for k, (p, _) in enumerate(self.parameters):
                _write(p, self._weight(k, self._step(k)))
            for (p, _), grad in zip(self.parameters, self.grads, strict=True):
                p.grad = grad
            with torch.enable_grad():
                loss = closure()
            self.grads = [p.grad for p, _ in self.parameters]
            for (p, _), value in zip(self.parameters, here, strict=True):
                _write(p, value)
            self._gradients_to_z()
            return loss

        return evaluate

    def _write_weights(self) -> None:
        """Every Parameter holds w again, moved as z was."""
        if self.limit is None:
            for k, (p, _) in enumerate(self.parameters):
                _write(p, self._weight(k, self._step(k)))
            return
        steps = [self._step(k) for k in range(len(self.parameters))]
        steps = self.limit([p for p, _ in self.parameters], self.start, steps)
        for k, ((p, _), step) in enumerate(zip(self.parameters, steps, strict=True)):
            _write(p, self._weight(k, step))

    def _check_range(self) -> None:
        """z may be beyond fp16 where w is not; bf16 has the range of fp32."""
        for p, _ in self.parameters:
            if p.dtype == torch.float16 and not bool(torch.isfinite(p).all()):
                raise PathError(
                    "a weight in invariant coordinates is beyond the range of float16, in which this "
                    "optimizer keeps it: use bfloat16 or float32 parameters, or PathSGD"
                )

    def _gradients_to_z(self) -> None:
        place_gradients(p for p, _ in self.parameters)
        for p, gamma in self.parameters:
            if p.grad is not None:
                if p.grad.is_sparse:
                    raise RuntimeError("PathNormalized does not support sparse gradients")
                p.grad = gamma.gradient_to_z(_compute_dtype(p.grad, gamma)).to(p.dtype)

    def _step(self, k: int) -> Tensor:
        """``z' - z``, with z computed again as it was written: a parameter of low precision rounds it."""
        p, gamma = self.parameters[k]
        z = gamma.weight_to_z(_compute_dtype(self.start[k], gamma)).to(p.dtype)
        return _compute_dtype(p, gamma) - _compute_dtype(z, gamma)

    def _weight(self, k: int, step: Tensor) -> Tensor:
        """``w + (z' - z) / sqrt(gamma)``: exactly w where the optimizer did not move."""
        p, gamma = self.parameters[k]
        return self.start[k] + gamma.step_from_z(step).to(p.dtype)


@torch.no_grad()
def _write(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value)


def _compute_dtype(x: Tensor, gamma: Gamma) -> Tensor:
    return x.detach().to(gamma.dtype)
