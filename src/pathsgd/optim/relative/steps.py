"""Relative steps of one optimizer: its base moves u, and blocks turn and grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd._torch import is_capturing
from pathsgd.optim.gamma_cache import GammaCache
from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.relative.captured_step import CapturedStep, is_capturable
from pathsgd.optim.relative.coordinates import BlockSubset, Coordinates, RelativeMeasurement
from pathsgd.optim.relative.growth import find_growth
from pathsgd.optim.relative.view import RelativeView

BaseStep = Callable[[Callable[[], Any] | None], Any]


class RelativeSteps:
    """The relative steps of the parameters of one model.

    Args:
        gamma_cache: the model's, which measures and keeps the coordinates.
        p: the order of the path norm.
        coordinates: invariant ones, or the weights themselves.
        growth: the rate at which norms grow, in units of lr.
    """

    def __init__(self, gamma_cache: GammaCache, p: float, coordinates: Coordinates, growth: float) -> None:
        if coordinates not in ("paths", "weights"):
            raise ValueError(f"Invalid coordinates: {coordinates!r} (one of 'paths', 'weights')")
        if not growth >= 0:
            raise ValueError(f"Invalid growth value: {growth}")
        self.gamma_cache, self.p, self.coordinates, self.growth = gamma_cache, p, coordinates, growth
        self._measurement: RelativeMeasurement | None = None
        self._captured: CapturedStep | None = None

    def measurement(self, names: Sequence[str] = ()) -> RelativeMeasurement:
        """What measures the coordinates of these parameters, or of those it was last asked for."""
        if self._measurement is None or (names and self._measurement.names != names):
            own = names or list(self.gamma_cache.graph.parameters)
            self._measurement = RelativeMeasurement(self.gamma_cache.graph, own, self.coordinates)
        return self._measurement

    def blocks_of(self, parameter: Tensor) -> list[Block]:
        """The blocks of a parameter; none if it is not the model's."""
        name = self.gamma_cache.names.get(id(parameter))
        return [] if name is None else self.measurement().by_name[name]

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, base_step: BaseStep) -> Any:
        """One step of the base on u; what is not the model's it moves as it does without us."""
        names = self.gamma_cache.names
        groups = {
            names[id(parameter)]: (parameter, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in names
        }
        moved = {n: p for n, (p, _) in groups.items() if closure is not None or p.grad is not None}
        if not moved:
            return base_step(closure)
        measurement = self.measurement(list(groups))
        with torch.no_grad():
            coordinates = self.gamma_cache.get(measurement, self.p)

        def grow(subset: BlockSubset, along: Tensor) -> Tensor:
            def option(name: str, default: float) -> float | Tensor:
                return self._per_block(
                    subset, {n: groups[n][1].get(name, default) for n in subset.names}, along
                )

            along = along * (1 - 2 * option("maximize", False))
            direction = find_growth(optimizer, [moved[n] for n in subset.names], subset.counts, along)
            lr, catch_up = option("lr", 0.0), subset.of(coordinates.catch_up)
            speed = torch.where(catch_up > 1, catch_up, subset.shares)
            factor = torch.exp(lr * self.growth * speed * direction)
            return factor * (1 - lr * option("weight_decay", 0.0))

        def run() -> Any:
            view = RelativeView(moved, measurement, coordinates, grow)
            with torch.no_grad(), view.entered():
                return base_step(None if closure is None else view.wrap(closure))

        # Where the measurement is replayed into the same tensors each time, so can the step be.
        static = closure is None and not is_capturing() and self.gamma_cache.is_captured(self.p, measurement)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if static and is_capturable(optimizer, parameters):
            if self._captured is None or not self._captured.fits(parameters, coordinates):
                self._captured = CapturedStep(optimizer, parameters, coordinates, run)
            self._captured.replay()
            loss = None
        else:
            loss = run()
        self.gamma_cache.after_step()
        return loss

    @staticmethod
    def _per_block(subset: BlockSubset, values: dict[str, float | Tensor], like: Tensor) -> float | Tensor:
        """An option of every block; one number where all have the same."""
        found = [values[block.name] for block in subset.blocks]
        tensors = any(isinstance(value, Tensor) for value in found)  # not to be looked at
        if all(value is found[0] or (not tensors and value == found[0]) for value in found[1:]):
            return found[0]
        return torch.stack(
            [value.to(like) if isinstance(value, Tensor) else like.new_full((), value) for value in found]
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_measurement": None, "_captured": None}
