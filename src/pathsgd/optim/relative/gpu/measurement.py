"""The coordinates of relative steps as the kernels read them: a factor a unit and a size a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.geometry.canonical import measure_unit_factors
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.passes import PoweredNetwork
from pathsgd.geometry.range_check import RangeCheck, measure_in_range
from pathsgd.graph.path_graph import PathGraph
from pathsgd.optim.relative.coordinates import Coordinates, RelativeMeasurement
from pathsgd.optim.relative.gpu.kernels import SUMS, WARPS, norm_kernel
from pathsgd.optim.relative.gpu.layout import Layout
from pathsgd.optim.relative.unit_scales import UnitState, read_units


@dataclass(frozen=True)
class UnitCoordinates:
    """``u = w f / size`` with f the factor of the row times that of the input, in the order of a layout."""

    factors: Tensor
    sizes: Tensor
    """By block, as what follows."""
    turns: Tensor
    """Which blocks turn instead of growing."""
    catch_up: Tensor
    """How much faster than others those grow that are too small; 1 for the others."""
    exponents: bool
    units: UnitState | None = None


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
        layout, tiles = self.layout, self.tiles
        found = units = None
        factors = torch.ones(len(layout.heads), device=network.device)
        if self.coordinates == "paths":
            found = measure_unit_factors(network, check)
            by_class, units = found.factor.mantissa, read_units(found)
            factors = self.spread(by_class, by_class)
        if network.arithmetic.exponents:  # the kernels have plain floats: the caller looks at this alone
            return UnitCoordinates(factors, factors, factors, factors, True)
        fields, partial = self._point(network.edges.tensors), tiles.make_partial()
        sums = partial.new_zeros(len(self.blocks), SUMS.value)
        norm_kernel[tiles.grid](fields, tiles.tiles, factors, factors, partial, False, num_warps=WARPS)
        tiles.add_up(partial, sums, 1)
        sizes, turns, catch_up = self._place(network.device)[0].measure(sums[:, 0].sqrt(), found)
        return UnitCoordinates(factors, sizes.float(), turns, catch_up, False, units)

    def spread(self, into: Tensor, out: Tensor) -> Tensor:
        """Factors of classes in the order of the layout."""
        return into[self.layout.heads] / out[self.layout.tails] ** self.layout.degrees

    def _point(self, tensors: Tensors) -> Tensor:
        """The fields with the addresses of the weights, which seldom change."""
        layout = self.layout
        found = [
            tensors[name].data_ptr() + 4 * offset
            for name, offset in zip(layout.names, layout.offsets, strict=True)
        ]
        if found != self._addresses:
            fields = layout.fields.clone()
            fields[:, 0] = torch.tensor(found)
            self._addresses, self._fields = found, fields.to(layout.device)
        return self._fields
