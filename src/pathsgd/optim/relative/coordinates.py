"""The coordinates of relative steps: every block of parameters in units of its own size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pathsgd._torch import foreach
from pathsgd.geometry.canonical import UnitFactors, measure_unit_factors
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.extended_float import exact_frexp, exact_ldexp
from pathsgd.geometry.gamma import measure as measure_gammas
from pathsgd.geometry.passes import PoweredNetwork
from pathsgd.geometry.range_check import RangeCheck, measure_in_range
from pathsgd.graph.path_graph import PathGraph, compute_dtype
from pathsgd.graph.unit_classes import FIXED, EdgeClasses, unit_classes_of
from pathsgd.optim.relative.blocks import Block, find_blocks
from pathsgd.optim.relative.sizes import SizeTable

NOISE = 2.0**10
"""How many units in the last place of its family's gradient a bias's is at least, if it is not rounding."""

Coordinates = Literal["paths", "gamma", "weights"]


@dataclass(frozen=True)
class RelativeCoordinates:
    """``u = w to_u``, of which every block has root mean square 1 (or less), and back ``dw = du from_u``."""

    to_u: dict[str, Tensor]
    from_u: dict[str, Tensor]
    turns: Tensor
    """Which blocks turn instead of growing, in their order."""
    exponents: bool


class RelativeMeasurement:
    """Measures the relative coordinates of one graph's parameters."""

    capturable = True

    def __init__(self, graph: PathGraph, names: Sequence[str], coordinates: Coordinates) -> None:
        self.names, self.coordinates = list(names), coordinates
        self.by_name = find_blocks(graph)
        self.blocks: list[Block] = [block for name in self.names for block in self.by_name[name]]
        self.edges = {
            name: edge
            for name, edge in unit_classes_of(graph).parameters.items()
            if bool((edge.head != FIXED).any()) or bool((edge.tail != FIXED).any())
        }
        self._placed: dict[torch.device, tuple[SizeTable, dict[str, EdgeClasses]]] = {}

    def find_noise(self, grads: Tensors) -> Tensor:
        """Which blocks have a gradient that is rounding and nothing else."""
        blocks = self.blocks_of(grads)
        norms = torch.stack(foreach("norm", blocks, 2, dtype=torch.float64))
        return self._place(norms.device)[0].find_noise(norms, NOISE * torch.finfo(blocks[0].dtype).eps)

    def _place(self, device: torch.device) -> tuple[SizeTable, dict[str, EdgeClasses]]:
        """What is needed on a device, put there once: a CUDA graph cannot capture the transfer."""
        if device not in self._placed:
            edges = {
                name: EdgeClasses(edge.head.to(device), edge.tail.to(device), edge.degree)
                for name, edge in self.edges.items()
            }
            self._placed[device] = SizeTable(self.blocks, device), edges
        return self._placed[device]

    def blocks_of(self, tensors: Tensors) -> list[Tensor]:
        """The blocks of all parameters, in their order, from tensors by name."""
        return [block.of(tensors[block.name]) for block in self.blocks]

    def run(self, graph: PathGraph, tensors: Tensors, p: float, exponents: bool | None) -> RelativeCoordinates:
        if self.coordinates == "weights":
            return self._coordinates(tensors, compute_dtype(tensors), None, {})
        return measure_in_range(graph, tensors, p, self.measure, exponents)

    @torch.no_grad()
    def measure(self, network: PoweredNetwork, check: RangeCheck | None) -> RelativeCoordinates:
        tensors, dtype = network.edges.tensors, network.arithmetic.dtype
        if self.coordinates == "gamma":
            gammas = measure_gammas(network, check)
            normalised = [n for n in self.names if network.graph.parameters[n].normalised]
            roots = {n: gammas[n].dense().sqrt() for n in normalised}
            return self._coordinates(tensors, dtype, None, {n: _Scale(r, torch.where(r > 0, 1 / r, 0)) for n, r in roots.items()})
        if self.coordinates == "weights":
            return self._coordinates(tensors, dtype, None, {})
        factors = measure_unit_factors(network, check)
        _, edges = self._place(network.device)
        scales = {n: _canonical(factors, edges[n], tensors[n]) for n in self.names if n in edges}
        return self._coordinates(tensors, dtype, factors, scales)

    def _coordinates(
        self, tensors: Tensors, dtype: torch.dtype, factors: UnitFactors | None, scales: dict[str, _Scale]
    ) -> RelativeCoordinates:
        weights = {name: tensors[name].detach().to(dtype) for name in self.names}
        z = {name: scales[name].apply(w) if name in scales else w for name, w in weights.items()}
        norms = torch.stack(foreach("norm", self.blocks_of(z), 2, dtype=torch.float64))
        exponents = factors is not None and factors.factor.exponent is not None
        shift = None
        if exponents:
            none = torch.zeros((), dtype=torch.int32, device=norms.device)
            shift = torch.stack([scales[b.name].shift if b.name in scales else none for b in self.blocks])
            shift = shift.clamp(-1000, 1000)
            norms = exact_ldexp(norms, shift)
        size, turns = self._place(norms.device)[0].measure(norms, factors)
        if shift is not None:
            size = exact_ldexp(size, -shift)
        to_u, from_u = {}, {}
        for name, w in weights.items():
            to_u[name] = scales[name].scale.clone() if name in scales else torch.ones_like(w)
            from_u[name] = scales[name].inverse.clone() if name in scales else torch.ones_like(w)
        inverse = (1 / size).to(dtype).unbind()
        for own, back, factor, s in zip(
            self.blocks_of(to_u), self.blocks_of(from_u), inverse, size.to(dtype).unbind(), strict=True
        ):
            own.mul_(factor)
            back.mul_(s)
        for name, scale in scales.items():
            if scale.exponent is not None:
                to_u[name] = exact_ldexp(to_u[name], scale.exponent)
                from_u[name] = exact_ldexp(from_u[name], -scale.exponent)
        return RelativeCoordinates(to_u, from_u, turns, exponents)


@dataclass(frozen=True)
class _Scale:
    """z = w * scale * 2^exponent of one parameter, in units of 2^shift."""

    scale: Tensor
    inverse: Tensor
    exponent: Tensor | None = None
    shift: Tensor | None = None

    def apply(self, weight: Tensor) -> Tensor:
        z = weight * self.scale
        return z if self.exponent is None else exact_ldexp(z, self.exponent)


def _canonical(factors: UnitFactors, edge: EdgeClasses, weight: Tensor) -> _Scale:
    """The scale of one parameter from the factors of the units at its ends."""
    head, tail = edge.head, edge.tail
    mantissa, exponent = factors.factor
    out, into = mantissa[head], mantissa[tail]
    for _ in range(edge.degree - 1):
        into = into * mantissa[tail]
    scale, inverse = (out / into).expand(weight.shape), (into / out).expand(weight.shape)
    if exponent is None:
        return _Scale(scale, inverse)
    total = (exponent[head] - edge.degree * exponent[tail]).expand(weight.shape)
    _, own = exact_frexp(weight.detach().to(mantissa.dtype))
    # A deep network's z leave the range of floats: they are kept in units of the largest.
    shift = (own + total).amax()
    shift = torch.where(shift < -(1 << 20), 0, shift)  # all are zero
    return _Scale(scale, inverse, total - shift, shift)
