"""When gamma is measured, kept and thrown away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from pathsgd._torch import is_capturing, version
from pathsgd.errors import PathError
from pathsgd.geometry.gamma import Gamma, Gammas, measure_gammas
from pathsgd.geometry.shared_weights import Shared
from pathsgd.graph.path_graph import PathGraph, unwrap
from pathsgd.graph.trace import Example
from pathsgd.optim.captured_gammas import CapturedGammas
from pathsgd.optim.lazy_graph import LazyGraph

WARM_UP = 3
"""Measurements before gamma is captured in a CUDA graph."""

Version = tuple[int, int]


def versions(tensors: Iterable[Tensor]) -> list[Version]:
    """Where each tensor lies and how often torch has written it. A write through ``.data``, numpy or a fused
    CPU optimizer is not counted: after one, call the optimizer's ``refresh()``."""
    return [(tensor.data_ptr(), version(tensor)) for tensor in tensors]


class GammaCache:
    """The gammas of one model: measured when a step first needs them, valid until weights are written."""

    def __init__(
        self,
        model: nn.Module,
        example_input: Example | PathGraph | None,
        batch_dim: int | None = 0,
        refresh_every: int = 1,
        shared: Shared = "kappa1",
        warn: bool = True,
    ) -> None:
        if refresh_every < 1:
            raise ValueError(f"Invalid refresh_every value: {refresh_every}")
        self.model = unwrap(model)
        self.lazy_graph = LazyGraph(self.model, example_input, batch_dim, warn)
        self.refresh_every = refresh_every
        self.shared = shared
        self.names = _names(self.model)
        self.needs_exponents: dict[float, bool] = {}
        self._gammas: dict[float, Gammas] = {}
        self._versions: list[Version] = []
        self._captured: dict[float, CapturedGammas] = {}
        self._measurements = 0
        self._steps = 0

    @property
    def graph(self) -> PathGraph:
        return self.lazy_graph.get()

    def gammas(self, p: float) -> Gammas:
        """gamma of every parameter of the model, measured now unless the cached one is still valid."""
        if self._gammas and not is_capturing() and self._current_versions() != self._versions:
            self.refresh()
        if p not in self._gammas:
            if is_capturing():
                # A compiled or captured step cannot look at values, so it takes plain floats or exponents
                # as the last step outside did.
                tensors = self.graph.tensors(self.model)
                exponents = self.needs_exponents.get(p, False)
                return measure_gammas(self.graph, tensors, p, exponents=exponents, shared=self.shared)
            self.check_identity()
            self._gammas[p] = self._measure(p)
            self.needs_exponents[p] = self._gammas[p].exponents
            self._versions = self._current_versions()
        return self._gammas[p]

    def gammas_of(self, parameters: Sequence[Tensor], p: float) -> list[Gamma | None]:
        """gamma of each of these parameters; None where it falls back to gamma = 1."""
        if not parameters:
            return []
        gammas, infos = self.gammas(p), self.graph.parameters
        names = [self.names.get(id(parameter)) for parameter in parameters]
        return [gammas[name] if name is not None and infos[name].normalised else None for name in names]

    def _measure(self, p: float) -> Gammas:
        """On a GPU by a captured CUDA graph, once plain floats have been seen to be enough."""
        tensors = self.graph.tensors(self.model)
        captured = self._captured.pop(p, None)
        if captured is not None and captured.fits(tensors):
            gammas = captured.replay()
            if gammas is not None:
                self._captured[p] = captured
                return gammas
        gammas = measure_gammas(self.graph, tensors, p, shared=self.shared)
        self._measurements += 1
        on_gpu = all(tensor.is_cuda for tensor in tensors.values())
        if on_gpu and self._measurements > WARM_UP and self.shared == "kappa1" and not gammas.exponents:
            self._captured[p] = CapturedGammas(self.graph, tensors, p)
            self._measurements = 0  # weights that keep moving in memory are not captured every time
        return gammas

    def is_captured(self, p: float) -> bool:
        """Whether gamma at this p is replayed from a CUDA graph."""
        return p in self._captured

    def calibrate(self, p: float) -> None:
        """Finds out whether plain floats are enough, for a step that is compiled before any is run."""
        if self.lazy_graph.graph is not None:
            self.gammas(p)
            self.refresh()

    def after_step(self) -> None:
        """A step has written the weights."""
        if is_capturing():
            return  # nothing was cached, and a count would make torch.compile recompile
        self._steps += 1
        if self._steps % self.refresh_every == 0:
            self.refresh()
        elif self._gammas:
            self._versions = self._current_versions()

    def refresh(self) -> None:
        """Throws the cached gammas away."""
        self._gammas.clear()

    def _current_versions(self) -> list[Version]:
        # Running statistics change with every batch: they do not count where gamma may be some steps old.
        buffers = self.model.buffers() if self.refresh_every == 1 else ()
        return versions([*self.model.parameters(), *buffers])

    def check_known(self, groups: Sequence[dict[str, Any]]) -> None:
        """At least one parameter of the optimizer is the model's; others may come along."""
        parameters = [parameter for group in groups for parameter in group["params"]]
        if parameters and not any(id(parameter) in self.names for parameter in parameters):
            raise TypeError(
                "none of these parameters belongs to the model the graph was traced from (those of a copy "
                "do not), so this would silently be SGD: trace the model they belong to"
            )

    def check_identity(self) -> None:
        """The model still has the Parameters it had."""
        for name, parameter in self.model.named_parameters():
            if self.names.get(id(parameter)) != name:
                raise PathError(
                    f"parameter {name!r} is not the one the optimizer was made with (it was replaced or "
                    "added since); make the optimizer again"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gammas": {}, "_captured": {}, "names": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.names = _names(self.model)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}
