"""Parameters as u, in units of their size, around the step of any optimizer; then the step as a turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pathsgd._torch import foreach
from pathsgd.geometry.sharded import local_part, place_gradients, place_like
from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.relative.coordinates import BlockSubset, RelativeCoordinates, RelativeMeasurement
from pathsgd.optim.relative.sums import measure_turn
from pathsgd.optim.relative.unit_scales import Rescaling

Grow = Callable[[BlockSubset, Tensor, Tensor], Tensor]
"""From <g, u> and the norm of g of each of these blocks to the factor by which its norm grows."""
SetLengths = Callable[[BlockSubset, list[Tensor], list[Tensor]], None]
"""Given u of each of these blocks and the base's step, makes the step as long as is due. Either all of them
turn or none."""
Rescale = Callable[[], Rescaling | None]
"""What units are rescaled by; asked after the base has made its state."""


class RelativeView:
    """Parameters that hold u, and the gradient of u, inside :meth:`entered`.

    In place, on the same Parameters, or on what this rank holds of them. Three copies are held meanwhile: of
    the weights, of u, of the gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        measurement: RelativeMeasurement,
        coordinates: RelativeCoordinates,
        grow: Grow,
        set_lengths: SetLengths,
        rescale: Rescale,
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.measurement, self.coordinates = measurement, coordinates
        self.grow, self.set_lengths, self.rescale = grow, set_lengths, rescale
        self.to_u = [coordinates.to_u[name] for name in parameters]
        self.from_u = [coordinates.from_u[name] for name in parameters]
        self.start: list[Tensor] = []
        self.u: list[Tensor] = []
        self.grads: list[Tensor | None] = []
        self.gradient_norms = torch.empty(0)
        """Of u, of all blocks."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On an error everything is put back."""
        own = self._own()
        self.start = [w.clone() for w in own]
        self.grads = [p.grad for p in self.parameters]
        try:
            wide = [w.to(factor.dtype) for w, factor in zip(self.start, self.to_u, strict=True)]
            self.u = list(foreach("mul", wide, self.to_u))
            foreach("copy_", own, self.u)
            # As the parameters hold it: one of low precision rounds it.
            self.u = [u if w.dtype == u.dtype else w.to(u.dtype) for w, u in zip(own, self.u, strict=True)]
            self._gradients_to_u()
            yield
            self._write_weights(turn=True)
        except BaseException:
            self._write(self.start)
            raise
        finally:
            for p, grad in zip(self.parameters, self.grads, strict=True):
                p.grad = grad

    def wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure as a function of u: evaluated at the weights u stands for."""

        def evaluate() -> Any:
            here = [own.clone() for own in self._own()]
            self._write_weights(turn=False)
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
    def _own(self) -> list[Tensor]:
        """What this rank holds of the parameters."""
        return [local_part(p).detach() for p in self.parameters]

    def _write(self, values: list[Tensor]) -> None:
        foreach("copy_", self._own(), values)

    def _gradients_to_u(self) -> None:
        found = [k for k, p in enumerate(self.parameters) if p.grad is not None]
        if any(self.parameters[k].grad.is_sparse for k in found):  # type: ignore[union-attr]
            raise RuntimeError("relative steps do not support sparse gradients")
        place_gradients(self.parameters)
        grads = [local_part(self.parameters[k].grad).to(self.from_u[k].dtype) for k in found]  # type: ignore[arg-type]
        grads = list(foreach("mul", grads, [self.from_u[k] for k in found])) if found else []
        own = {self.names[k]: grad for k, grad in zip(found, grads, strict=True)}
        self.gradient_norms = self.measurement.zero_noise_(own)
        for k, grad in zip(found, grads, strict=True):
            p = self.parameters[k]
            p.grad = place_like(grad.to(p.dtype), p)

    @torch.no_grad()
    def _write_weights(self, turn: bool) -> None:
        """Writes w moved as u was, in the memory of the parameters if their precision is that of u."""
        own = self._own()
        moved = [w.to(u.dtype) for w, u in zip(own, self.u, strict=True)]
        foreach("sub_", moved, self.u)
        turned = None
        if turn:
            self._shorten(moved)
            turned = self._turn(moved)
        for w, du, factor in zip(self.start, moved, self.from_u, strict=True):
            torch.addcmul(w, du, factor, out=du)
        if turned is not None:
            subset, factors = turned
            for block, factor in zip(self._blocks_of(subset, moved), factors, strict=True):
                block.mul_(factor)
        for w, new in zip(own, moved, strict=True):
            if w is not new:
                w.copy_(new)
        rescaling = self.rescale() if turn else None
        if rescaling is not None:
            self.measurement.rescale_(rescaling, self.names, own)

    def _turn(self, steps: list[Tensor]) -> tuple[BlockSubset, Sequence[Tensor]] | None:
        """The factors that bring every block that turns back to the norm it had, times the growth that its
        gradient asks for. It leaves u moved."""
        subset = self._choose(lambda block: block.turns)
        if subset is None:
            return None
        before, blocks = self._blocks_of(subset, self.u), self._blocks_of(subset, steps)
        self.set_lengths(subset, before, blocks)
        grads = [None if p.grad is None else local_part(p.grad) for p in self.parameters]
        along, old, new = measure_turn(subset.blocks, self._blocks_of(subset, grads), before, blocks)
        growth = self.grow(subset, along, subset.of(self.gradient_norms))
        turns = subset.of(self.coordinates.turns) & (old > 0) & (new > 0)
        factors = torch.where(turns, growth * old / torch.where(turns, new, 1), 1)
        return subset, factors.to(blocks[0].dtype).unbind()

    def _shorten(self, steps: list[Tensor]) -> None:
        """Shortens the steps of blocks that do not turn, where they take a part only."""
        subset = self._choose(lambda block: not block.turns and block.ratio < 1)
        if subset is not None:
            self.set_lengths(subset, self._blocks_of(subset, self.u), self._blocks_of(subset, steps))

    def _choose(self, chooses: Callable[[Block], bool]) -> BlockSubset | None:
        """The blocks of those parameters that have a gradient and are chosen by their first block."""
        names = [
            name
            for name, p in zip(self.names, self.parameters, strict=True)
            if p.grad is not None and chooses(self.measurement.by_name[name][0])
        ]
        return self.measurement.subset(names, self.u[0].device) if names else None

    def _blocks_of(self, subset: BlockSubset, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        chosen = set(subset.names)
        return subset.blocks_of(
            {
                name: tensor.to(u.dtype)
                for name, tensor, u in zip(self.names, tensors, self.u, strict=True)
                if name in chosen and tensor is not None
            }
        )
