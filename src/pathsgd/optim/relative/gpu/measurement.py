"""The coordinates of relative steps as the kernels read them: a factor a unit and a size a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.geometry.canonical import UnitFactors, measure_unit_factors
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.passes import PoweredNetwork
from pathsgd.geometry.range_check import RangeCheck, measure_in_range
from pathsgd.graph.path_graph import PathGraph
from pathsgd.optim.relative.coordinates import Coordinates, RelativeMeasurement
from pathsgd.optim.relative.gpu.kernels import SUMS, norm_kernel
from pathsgd.optim.relative.gpu.layout import Layout


@dataclass(frozen=True)
class UnitCoordinates:
    """``u = w (heads / tails) / sizes`` with heads and tails in the order of a layout, and sizes by block."""

    heads: Tensor
    tails: Tensor
    sizes: Tensor
    inverse_sizes: Tensor
    turns: Tensor
    """Which blocks turn instead of growing."""
    catch_up: Tensor
    """How much faster than others those grow that are too small; 1 for the others."""
    exponents: bool


class UnitMeasurement(RelativeMeasurement):
    """Measures them."""

    def __init__(
        self, graph: PathGraph, names: Sequence[str], coordinates: Coordinates, tensors: Tensors
    ) -> None:
        super().__init__(graph, names, coordinates)
        edges = self.edges if coordinates == "paths" else {}
        strides = {name: tensors[name].stride() for name in names}
        self.layout = Layout(self.blocks, edges, strides, tensors[names[0]].device)
        self.tiles = self.layout.choose(range(len(self.blocks)))
        self._addresses: list[int] = []
        self._fields = self.layout.fields

    def run(  # type: ignore[override]
        self, graph: PathGraph, tensors: Tensors, p: float, exponents: bool | None
    ) -> UnitCoordinates:
        return measure_in_range(graph, tensors, p, self.measure, exponents)

    def measure(  # type: ignore[override]
        self, network: PoweredNetwork, check: RangeCheck | None
    ) -> UnitCoordinates:
        factors = measure_unit_factors(network, check) if self.coordinates == "paths" else None
        heads = tails = torch.ones(len(self.layout.heads), device=network.device)
        exponents = network.arithmetic.exponents
        if factors is not None:
            heads, tails = self._find_ends(factors)
        if exponents:  # the kernels have plain floats: the caller looks at this alone
            return UnitCoordinates(heads, tails, heads, heads, heads, heads, True)
        fields, partial = self._point(network.edges.tensors), self.tiles.make_partial()
        sums = partial.new_zeros(len(self.blocks), SUMS.value)
        norm_kernel[self.tiles.grid](fields, self.tiles.tiles, heads, tails, heads, partial, False)
        self.tiles.add_up(partial, sums)
        size, turns, catch_up = self._place(network.device)[0].measure(sums[:, 0].sqrt(), factors)
        return UnitCoordinates(heads, tails, size.float(), (1 / size).float(), turns, catch_up, False)

    def _find_ends(self, factors: UnitFactors) -> tuple[Tensor, Tensor]:
        mantissa = factors.factor.mantissa
        return mantissa[self.layout.heads], mantissa[self.layout.tails] ** self.layout.degrees

    def _point(self, tensors: Tensors) -> Tensor:
        """The fields with the addresses of the weights, which seldom change."""
        bytes_before = [4 * offset for offset in self.layout.offsets]
        found = [
            tensors[block.name].data_ptr() + k for block, k in zip(self.blocks, bytes_before, strict=True)
        ]
        if found != self._addresses:
            fields = self.layout.fields.clone()
            fields[:, 0] = torch.tensor(found)
            self._addresses, self._fields = found, fields.to(self.layout.device)
        return self._fields
