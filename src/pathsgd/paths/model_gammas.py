"""The gammas of a model that is trained: measured at every step from the weights as they are.

Paths end at batch norms here. Their running statistics lag behind the weights and differ between processes,
so they do not enter steps; :func:`pathsgd.gammas` and :func:`pathsgd.path_norm` have them as they act.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pathsgd._torch import Version, is_capturing
from pathsgd.geometry.gamma import Gamma, Gammas, measure_gammas
from pathsgd.graph.path_graph import PathGraph
from pathsgd.training.lazy_graph import LazyGraph
from pathsgd.training.staleness import ModelTensors, find_versions

CHECK_EVERY = 100
"""Steps between two that look whether numbers are in range, for which the host waits for a GPU."""


class ModelGammas:
    """Measures gamma of one model."""

    def __init__(self, lazy_graph: LazyGraph) -> None:
        self.lazy_graph = lazy_graph
        self.tensors = ModelTensors(lazy_graph.model)
        self._count = 0
        self._centered: dict[float, bool] = {}
        """Whether numbers needed exponents when they were last looked at, by p."""
        self._kept: dict[float, tuple[list[Version], Gammas]] = {}
        """Gammas that were measured to clip gradients by, for the step after it."""

    @property
    def graph(self) -> PathGraph:
        """The graph with a batch norm as what it is in training: an operator that paths end at."""
        return self.lazy_graph.get().in_training

    def measure(self, p: float, keep: bool = False) -> Gammas:
        """gamma of the weights as they are; what was kept, if nothing has written them since."""
        tensors = self.tensors.read(self.graph)
        kept = None if is_capturing() else self._kept.pop(p, None)
        if kept is not None and kept[0] == find_versions(tensors):
            return kept[1]
        looks = not is_capturing() and self._count % CHECK_EVERY == 0
        measured = measure_gammas(
            self.graph, tensors, p, centered=None if looks else self._centered.get(p, True)
        )
        if not is_capturing():
            self._count += 1
            self._centered[p] = measured.centered
        if keep and not is_capturing():
            self._kept[p] = find_versions(tensors), measured
        return measured

    def select(self, parameters: Sequence[Tensor], p: float, keep: bool = False) -> list[Gamma | None]:
        """gamma of each of these; None where it is taken to be 1."""
        self.tensors.read(self.graph)  # which checks that the model is still the same
        if not any(map(self.is_normalised, parameters)):
            return [None] * len(parameters)
        gammas, names = self.measure(p, keep), self.tensors.names
        return [gammas[names[id(q)]] if self.is_normalised(q) else None for q in parameters]

    def is_normalised(self, parameter: Tensor) -> bool:
        """Whether a parameter is the model's and shares paths with others."""
        name = self.tensors.names.get(id(parameter))
        return name is not None and self.graph.parameters[name].normalised

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": {}}
