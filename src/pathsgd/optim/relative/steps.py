"""Relative steps of one optimizer: its base moves u, and blocks turn and grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach, is_capturing
from pathsgd.geometry.devices import has_triton, on_device
from pathsgd.geometry.sharded import shards_of
from pathsgd.optim.fused.dispatch import Choice, Kind
from pathsgd.optim.gamma_cache import GammaCache
from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.relative.captured_step import CapturedStep, is_capturable
from pathsgd.optim.relative.coordinates import (
    BlockSubset,
    Coordinates,
    RelativeCoordinates,
    RelativeMeasurement,
)
from pathsgd.optim.relative.growth import find_growth
from pathsgd.optim.relative.sharded_spectral import find_norms_over_ranks
from pathsgd.optim.relative.spectral import find_spectral_norms
from pathsgd.optim.relative.unit_scales import Rescaling, UnitState, find_kept
from pathsgd.optim.relative.view import RelativeView

if TYPE_CHECKING:
    from pathsgd.optim.relative.gpu.choice import KernelChoice
    from pathsgd.optim.relative.gpu.measurement import UnitCoordinates
    from pathsgd.optim.relative.gpu.step import KernelStep

Groups = dict[str, dict[str, Any]]
"""The group of every parameter by name."""
ENTRYWISE = tuple(
    getattr(torch.optim, name) for name in ("Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop")
)
"""Bases that divide by the size of every entry: what a matrix makes of such a step is its spectral norm."""
BaseStep = Callable[[Callable[[], Any] | None], Any]


class RelativeSteps:
    """The relative steps of the parameters of one model.

    Args:
        gamma_cache: the model's, which measures and keeps the coordinates.
        p: the order of the path norm.
        coordinates: invariant ones, or the weights themselves.
        growth: the rate at which norms grow, in units of lr.
        implementation: "reference" in ordinary operations, "triton" by kernels.
    """

    def __init__(
        self,
        gamma_cache: GammaCache,
        p: float,
        coordinates: Coordinates,
        growth: float,
        implementation: Choice = "auto",
    ) -> None:
        if coordinates not in ("paths", "weights"):
            raise ValueError(f"Invalid coordinates: {coordinates!r} (one of 'paths', 'weights')")
        if not growth >= 0:
            raise ValueError(f"Invalid growth value: {growth}")
        self.gamma_cache, self.p, self.coordinates, self.growth = gamma_cache, p, coordinates, growth
        self._measurement: RelativeMeasurement | None = None
        self.implementation = implementation
        self.last_kinds: dict[int, Kind] = {}
        """Which implementation moved each parameter in the last step, by its id, if not the reference."""
        self._captured: CapturedStep | None = None
        self._kernels: KernelChoice | None = None

    def measurement(self, names: Sequence[str] = ()) -> RelativeMeasurement:
        """What measures the coordinates of these parameters, or of those it was last asked for."""
        if self._measurement is None or (names and self._measurement.names != names):
            own = names or list(self.gamma_cache.graph.parameters)
            shards = {name: shards_of(p) for name, p in self.gamma_cache.model.named_parameters()}
            self._measurement = RelativeMeasurement(self.gamma_cache.graph, own, self.coordinates, shards)
        return self._measurement

    def blocks_of(self, parameter: Tensor) -> list[Block]:
        """The blocks of a parameter; none if it is not the model's."""
        name = self.gamma_cache.names.get(id(parameter))
        return [] if name is None else self.measurement().by_name[name]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it has kernels of its own
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, base_step: BaseStep) -> Any:
        """One step of the base on u; what is not the model's it moves as it does without us."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if closure is None:
            parameters = [p for p in parameters if p.grad is not None]
        names = self.gamma_cache.names
        moved = {names[id(p)]: p for p in parameters if id(p) in names}
        if not moved:
            if parameters:  # the model may have others by now
                self.gamma_cache.check_identity()
            return base_step(closure)
        loss = None
        with torch.no_grad(), on_device(parameters[0].device):
            if closure is not None or not self._replay(parameters):
                loss = self._step(optimizer, parameters, moved, closure, base_step)
        self.gamma_cache.after_step()
        return loss

    def _replay(self, parameters: list[Tensor]) -> bool:
        """Takes the step that was captured, if it is still this one."""
        step = self._captured
        if step is None or is_capturing() or not step.fits(parameters):
            return False
        if self.gamma_cache.get(step.measurement, self.p) is not step.coordinates:
            return False
        step.replay()
        return True

    def _step(
        self, optimizer: Optimizer, parameters: list[Tensor], moved: dict[str, Tensor],
        closure: Callable[[], Any] | None, base_step: BaseStep,
    ) -> Any:  # fmt: skip
        names = self.gamma_cache.names
        groups = {names[id(p)]: g for g in optimizer.param_groups for p in g["params"] if id(p) in names}
        found = None
        if closure is None and len(moved) == len(parameters):
            found = self._find_kernels(optimizer, list(groups), moved)
        self.last_kinds = {} if found is None else {id(p): "triton" for p in parameters}
        point: Callable[[bool], None] | None = None
        measurement: RelativeMeasurement
        coordinates: UnitCoordinates | RelativeCoordinates

        def grow(subset: BlockSubset, along: Tensor, gradients: Tensor) -> Tensor:
            return self._grow(optimizer, groups, moved, subset, along, gradients, coordinates.catch_up)

        def rescale() -> Rescaling | None:
            return self._rescale(optimizer, groups, moved, measurement, coordinates.units)

        def set_lengths(subset: BlockSubset, u: list[Tensor], steps: list[Tensor]) -> None:
            if not isinstance(optimizer, ENTRYWISE):
                _shorten(subset, steps)
                return
            # Nothing shortens decoupled decay; of other bases decay is a part of the step.
            lost = _find_decay(groups, subset)
            _add(steps, u, lost)
            if subset.blocks[0].turns:
                _set_spectral_norms(optimizer, groups, moved, subset, steps)
            else:
                _shorten(subset, steps)
            _add(steps, u, -lost)

        if found is not None:
            kernels, units = found
            coordinates, measurement, point = units, kernels.measurement, kernels.point

            def run() -> Any:
                kernels.run(
                    units,
                    lambda subset, name: per_block(subset, groups, name, kernels.ratios),
                    self.growth,
                    rescale(),
                )

        else:
            measurement = self.measurement(list(groups))
            dense = coordinates = self.gamma_cache.get(measurement, self.p)

            def run() -> Any:
                view = RelativeView(moved, measurement, dense, grow, set_lengths, rescale)
                with view.entered():
                    return base_step(None if closure is None else view.wrap(closure))

        # Where the measurement is replayed into the same tensors each time, so can the step be.
        static = closure is None and not is_capturing() and self.gamma_cache.is_captured(self.p, measurement)
        if static and is_capturable(optimizer, parameters):
            self._captured = CapturedStep(optimizer, parameters, measurement, coordinates, run, point)
            self._captured.replay()
            return None
        if point is not None:
            point(False)
        return run()

    def _find_kernels(
        self, optimizer: Optimizer, names: list[str], moved: dict[str, Tensor]
    ) -> tuple[KernelStep, UnitCoordinates] | None:
        """The step by Triton kernels, if they can take it."""
        on_gpu = next(iter(moved.values())).is_cuda
        if (
            self.gamma_cache.sharded
            or not has_triton()
            or not (self.implementation == "triton" or (self.implementation == "auto" and on_gpu))
        ):
            return None
        if self._kernels is None:
            from pathsgd.optim.relative.gpu.choice import KernelChoice

            self._kernels = KernelChoice(self.gamma_cache, self.p, self.coordinates)
        return self._kernels.find(optimizer, names, moved)

    def _rescale(
        self, optimizer: Optimizer, groups: Groups, moved: dict[str, Tensor],
        measurement: RelativeMeasurement, units: UnitState | None,
    ) -> Rescaling | None:  # fmt: skip
        """What to rescale units by so that they keep their scale; None if there are none, or not now."""
        if units is None or len(units.factor) == 1 or not self.gamma_cache.is_last_of_coordinates():
            return None
        own = {name: groups[name]["lr"] for name in moved}
        # What has no rate is not to change at all.
        free = [name for name, lr in own.items() if isinstance(lr, Tensor) or lr != 0]
        device = units.factor.device
        state = find_kept(optimizer, next(iter(moved.values())))
        found = measurement.unit_scales(free, device).find_rescaling(state, units)
        for rate in {id(lr): lr for lr in own.values() if isinstance(lr, Tensor)}.values():
            found = Rescaling(*(torch.where(rate.to(device) > 0, factors, 1) for factors in found))
        return found

    def _grow(
        self, optimizer: Optimizer, groups: Groups, moved: dict[str, Tensor], subset: BlockSubset,
        along: Tensor, gradients: Tensor, catch_up: Tensor,
    ) -> Tensor:  # fmt: skip
        """The factors by which the norms of blocks grow, from <g, u> and the norm of g of each."""

        def option(name: str) -> float | Tensor:
            return per_block(subset, groups, name, along)

        along = along * (1 - 2 * option("maximize"))
        parameters = [moved[name] for name in subset.names]
        direction = find_growth(optimizer, parameters, subset.counts, along, gradients, parameters[0].dtype)
        catch_up = subset.of(catch_up)
        speed = torch.where(catch_up > 1, catch_up, subset.shares)
        factor = torch.exp(option("lr") * self.growth * speed * direction)
        return factor * (1 - option("lr") * option("weight_decay"))

    def __getstate__(self) -> dict[str, Any]:
        made = ("_measurement", "_captured", "_kernels")
        return {**self.__dict__, **dict.fromkeys(made), "last_kinds": {}}


def per_block(subset: BlockSubset, groups: Groups, name: str, like: Tensor) -> float | Tensor:
    """An option of every block, 0 if there is none; one number where all have the same."""
    runs = [
        (next(own), 1 + len(list(own))) for _, own in groupby(subset.blocks, lambda b: id(groups[b.name]))
    ]
    found = [groups[block.name].get(name, 0.0) for block, _ in runs]
    tensors = any(isinstance(value, Tensor) for value in found)  # not to be looked at
    if all(value is found[0] or (not tensors and value == found[0]) for value in found[1:]):
        return found[0]
    return torch.cat(
        [
            (value.to(like) if isinstance(value, Tensor) else like.new_full((), value)).expand(count)
            for value, (_, count) in zip(found, runs, strict=True)
        ]
    )


def _find_decay(groups: Groups, subset: BlockSubset) -> float | Tensor:
    """Which part of u decoupled decay takes away."""
    decay, decoupled, lr = (
        per_block(subset, groups, name, subset.spectral)
        for name in ("weight_decay", "decoupled_weight_decay", "lr")
    )
    none = any(isinstance(value, (int, float)) and not value for value in (decay, decoupled))
    return 0.0 if none else lr * decay * decoupled


def _add(steps: list[Tensor], u: list[Tensor], part: float | Tensor) -> None:
    """Adds a part of u to the steps, one number or one for each."""
    if isinstance(part, Tensor):
        parts = part.to(u[0].dtype).expand(len(u)).unbind()
        foreach("add_", steps, foreach("mul", u, parts))
    elif part:
        foreach("add_", steps, u, alpha=part)


def _shorten(subset: BlockSubset, steps: list[Tensor]) -> None:
    for ratio, step in zip(subset.ratios, steps, strict=True):
        if ratio < 1:
            step.mul_(ratio)


def _set_spectral_norms(
    optimizer: Optimizer, groups: Groups, moved: dict[str, Tensor], subset: BlockSubset, steps: list[Tensor]
) -> None:
    """Gives steps lr times the spectral norms of orthogonal matrices, as Muon's have."""
    lr = per_block(subset, groups, "lr", subset.spectral)
    matrices = [step.flatten(1) for step in steps]
    parameters = [moved[n] for n in subset.names]
    if any(block.shards for block in subset.blocks):
        norms = find_norms_over_ranks(optimizer, parameters, subset.counts, subset.blocks, matrices)
    else:
        norms = find_spectral_norms(optimizer, parameters, subset.counts, matrices)
    parts = (lr * subset.spectral / torch.where(norms > 0, norms, 1)).to(steps[0].dtype)
    foreach("mul_", steps, list(parts.unbind()))
