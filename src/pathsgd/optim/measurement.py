"""What is measured of a model's weights: gamma, and whatever else depends on the weights alone."""

from __future__ import annotations

from typing import Protocol, TypeVar

from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.gamma import Gammas, measure, measure_gammas
from pathsgd.geometry.passes import PoweredNetwork
from pathsgd.geometry.range_check import RangeCheck
from pathsgd.geometry.shared_weights import Shared
from pathsgd.graph.path_graph import PathGraph


class Found(Protocol):
    """What was measured."""

    @property
    def exponents(self) -> bool: ...


F = TypeVar("F", bound=Found, covariant=True)


class Measurement(Protocol[F]):
    """Something that depends on the weights alone."""

    capturable: bool
    """Whether :meth:`measure` alone finds it, so that a CUDA graph can."""
    reads_statistics: bool
    """Whether running statistics enter, which a forward pass writes."""

    def adapt(self, graph: PathGraph) -> PathGraph:
        """The graph that is measured."""

    def run(self, graph: PathGraph, tensors: Tensors, p: float, exponents: bool | None) -> F: ...

    def measure(self, network: PoweredNetwork, check: RangeCheck | None) -> F: ...


class GammaMeasurement:
    """gamma of every parameter."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.capturable = shared == "kappa1"
        self.reads_statistics = True

    def adapt(self, graph: PathGraph) -> PathGraph:
        return graph

    def run(self, graph: PathGraph, tensors: Tensors, p: float, exponents: bool | None) -> Gammas:
        return measure_gammas(graph, tensors, p, exponents=exponents, shared=self.shared)

    def measure(self, network: PoweredNetwork, check: RangeCheck | None) -> Gammas:
        return measure(network, check)
