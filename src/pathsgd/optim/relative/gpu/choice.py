"""When a relative step is taken by the kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd.optim.gamma_cache import GammaCache
from pathsgd.optim.relative.coordinates import Coordinates
from pathsgd.optim.relative.gpu.layout import NotAMatrix
from pathsgd.optim.relative.gpu.measurement import UnitCoordinates, UnitMeasurement
from pathsgd.optim.relative.gpu.step import KernelStep, is_supported


class KernelChoice:
    """The kernels of one model's relative steps, made anew when the layout of its weights changes."""

    def __init__(self, gamma_cache: GammaCache, p: float, coordinates: Coordinates) -> None:
        self.gamma_cache, self.p, self.coordinates = gamma_cache, p, coordinates
        self._layout: list[tuple[str, tuple[int, ...], torch.device]] = []
        self._measurement: UnitMeasurement | None = None
        self._step: KernelStep | None = None

    def find(
        self, optimizer: Optimizer, names: list[str], moved: dict[str, Tensor]
    ) -> tuple[KernelStep, UnitCoordinates] | None:
        """The step of these parameters and where it starts; None if the kernels cannot take it.

        Args:
            optimizer: whose step it is.
            names: of all parameters of the optimizer.
            moved: those that have gradients.
        """
        if not is_supported(optimizer, list(moved.values())):
            return None
        tensors = self.gamma_cache.tensors()
        layout = [(name, tensors[name].stride(), tensors[name].device) for name in names]
        if layout != self._layout:
            self._layout, self._step = layout, None
            try:
                self._measurement = UnitMeasurement(self.gamma_cache.graph, names, self.coordinates, tensors)
            except NotAMatrix:
                self._measurement = None
        if self._measurement is None:
            return None
        coordinates = self.gamma_cache.get(self._measurement, self.p)
        if coordinates.exponents:
            self._measurement = None  # they will be needed in the next step, too
            return None
        if (
            self._step is None
            or self._step.optimizer is not optimizer
            or list(self._step.parameters) != list(moved)
        ):
            self._step = KernelStep(optimizer, self._measurement, moved)
        return self._step, coordinates
