"""Parameters as u, in units of their size, around the step of any optimizer; the step as a turn and a growth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pathsgd._torch import foreach
from pathsgd.optim.relative.coordinates import RelativeCoordinates, RelativeMeasurement


class Growth:
    """Adam on the logarithm of every block's norm."""

    def __init__(self, blocks, ratio: float) -> None:
        self.ratio = ratio
        self.blocks = blocks
        self.first = self.second = None
        self.count = 0

    def step(self, along: Tensor, rates) -> Tensor:
        if self.first is None:
            self.first, self.second = torch.zeros_like(along), torch.zeros_like(along)
            self.share = torch.tensor([1 / b.share for b in self.blocks], dtype=torch.float64, device=along.device)
        self.count += 1
        self.first.lerp_(along, 0.1)
        self.second.mul_(0.99).addcmul_(along, along, value=0.01)
        a, b = self.first / (1 - 0.9**self.count), (self.second / (1 - 0.99**self.count)).sqrt()
        direction = torch.where(b > 0, a / torch.where(b > 0, b, 1), 0)
        return torch.exp(-rates * self.ratio * self.share * direction)


class RelativeView:
    """Parameters that hold u, and the gradient of u, inside :meth:`entered`."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        measurement: RelativeMeasurement,
        coordinates: RelativeCoordinates,
        growth: Growth,
        rates: list[float],
    ) -> None:
        self.parameters = list(parameters.values())
        self.names = list(parameters)
        self.measurement, self.growth, self.turns = measurement, growth, coordinates.turns
        self.rates = rates
        self.to_u = [coordinates.to_u[name] for name in parameters]
        self.from_u = [coordinates.from_u[name] for name in parameters]
        self.start: list[Tensor] = []
        self.u: list[Tensor] = []
        self.grads: list[Tensor | None] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On an error everything is put back."""
        self.start = [p.detach().clone() for p in self.parameters]
        self.grads = [p.grad for p in self.parameters]
        try:
            wide = [w.to(f.dtype) for w, f in zip(self.start, self.to_u, strict=True)]
            self.u = list(foreach("mul", wide, self.to_u))
            self._write(self.u)
            self._gradients_to_u()
            yield
        except BaseException:
            self._write(self.start)
            raise
        else:
            self._write(self._weights(split=True))
        finally:
            for p, grad in zip(self.parameters, self.grads, strict=True):
                p.grad = grad

    def wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure as a function of u."""

        def evaluate() -> Any:
            here = [p.detach().clone() for p in self.parameters]
            self._write(self._weights(split=False))
            for p, grad in zip(self.parameters, self.grads, strict=True):
                p.grad = grad
            with torch.enable_grad():
                loss = closure()
            self.grads = [p.grad for p in self.parameters]
            self._write(here)
            self._gradients_to_u()
            return loss

        return evaluate

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        foreach("copy_", self.parameters, values)

    def _gradients_to_u(self) -> None:
        live = [k for k, p in enumerate(self.parameters) if p.grad is not None]
        if any(self.parameters[k].grad.is_sparse for k in live):
            raise RuntimeError("relative steps do not support sparse gradients")
        grads = [self.parameters[k].grad.detach().to(self.from_u[k].dtype) for k in live]
        grads = list(foreach("mul", grads, [self.from_u[k] for k in live]))
        if len(live) == len(self.parameters):
            by_name = dict(zip(self.names, grads, strict=True))
            noise = self.measurement.find_noise(by_name)
            for block, own, quiet in zip(self.measurement.blocks, self._blocks_of(grads), noise.unbind(), strict=True):
                if not block.turns:
                    own.masked_fill_(quiet, 0)
            radial = foreach("mul", grads, self.u)
            along = torch.stack([x.sum(dtype=torch.float64) for x in self._blocks_of(list(radial))])
            self.factor = self.growth.step(along, self.rates)
        for k, g in zip(live, grads, strict=True):
            self.parameters[k].grad = g.to(self.parameters[k].dtype)

    def _weights(self, split: bool) -> list[Tensor]:
        """w moved as u was."""
        moved = [p.detach().to(u.dtype, copy=True) for p, u in zip(self.parameters, self.u, strict=True)]
        u = self.u
        if moved[0].dtype != self.parameters[0].dtype:  # a parameter of low precision rounded it
            u = [x.to(p.dtype).to(x.dtype) for x, p in zip(u, self.parameters, strict=True)]
        if split:
            self._turn(u, moved)
        foreach("sub_", moved, u)
        foreach("mul_", moved, self.from_u)
        return [w + step.to(w.dtype) for w, step in zip(self.start, moved, strict=True)]

    def _turn(self, u: list[Tensor], moved: list[Tensor]) -> None:
        """Brings every block that turns back to the norm it had, times the growth that its gradient asks for."""
        before, after = self._squares(u), self._squares(moved)
        turns = self.turns & (before > 0) & (after > 0)
        factor = torch.where(turns, (before / torch.where(turns, after, 1)).sqrt() * self.factor, 1)
        blocks = self._blocks_of(moved)
        for own, f in zip(blocks, factor.to(blocks[0].dtype).unbind(), strict=True):
            own.mul_(f)

    def _blocks_of(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.measurement.blocks_of(dict(zip(self.names, tensors, strict=True)))

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        """The squared l_2 norm of every block, in fp64: none is lost."""
        norms = foreach("norm", self._blocks_of(tensors), 2, dtype=torch.float64)
        return torch.stack(list(norms)).square()
