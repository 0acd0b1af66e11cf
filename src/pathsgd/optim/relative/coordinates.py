"""The coordinates of relative steps: every block of parameters in units of its own size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pathsgd.geometry.canonical import UnitFactors, measure_unit_factors
from pathsgd.geometry.class_edges import cut_edges
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.extended_float import DEAD, exact_frexp, exact_ldexp
from pathsgd.geometry.passes import PoweredNetwork
from pathsgd.geometry.range_check import RangeCheck, measure_in_range
from pathsgd.geometry.sharded import Shard, gather_vectors, local_part, reduce_over_ranks
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.running_statistics import end_at_statistics
from pathsgd.graph.unit_classes import FIXED, unit_classes_of
from pathsgd.optim.relative.blocks import Block, find_blocks
from pathsgd.optim.relative.edges import EdgeTable
from pathsgd.optim.relative.growth import NOISE
from pathsgd.optim.relative.sharded import cut_blocks
from pathsgd.optim.relative.sizes import SizeTable
from pathsgd.optim.relative.sums import find_norms
from pathsgd.optim.relative.unit_scales import Rescaling, UnitScales, UnitState, read_units
from pathsgd.optim.rule import multi_tensor

Coordinates = Literal["paths", "weights"]


@dataclass(frozen=True)
class RelativeCoordinates:
    """``u = w to_u``, of which every block has root mean square 1 (or less), and back ``dw = du from_u``.
    Both have the weight's shape or one that expands to it."""

    to_u: dict[str, Tensor]
    from_u: dict[str, Tensor]
    turns: Tensor
    """Which blocks turn instead of growing, in their order."""
    catch_up: Tensor
    """How much faster than others those grow that are too small; 1 for the others."""
    exponents: bool
    units: UnitState | None = None


@dataclass(frozen=True)
class BlockSubset:
    """The blocks of some of the parameters, on one device."""

    names: tuple[str, ...]
    """Of these parameters."""
    blocks: list[Block]
    counts: list[int]
    """How many each of the parameters has."""
    index: Tensor | None
    """Their numbers among all blocks; None if they are all of them."""
    ratios: list[float]
    """Which part of a step each takes."""
    shares: Tensor
    """Which part of a region's growth each takes."""
    spectral: Tensor
    """The spectral norm of this part of an orthogonal matrix, of root mean square 1, of the size of each."""

    def of(self, values: Tensor) -> Tensor:
        """Theirs, of the values of all blocks."""
        return values if self.index is None else values[self.index]

    def blocks_of(self, tensors: Tensors) -> list[Tensor]:
        """Their views of tensors by name."""
        return [block.of(tensors[block.name]) for block in self.blocks]


class RelativeMeasurement:
    """Measures the relative coordinates of one graph's parameters; of those that are sharded, as ``shards``
    says, of the part that this rank holds."""

    def __init__(
        self,
        graph: PathGraph,
        names: Sequence[str],
        coordinates: Coordinates,
        shards: Mapping[str, tuple[Shard, ...]] | None = None,
    ) -> None:
        self.names, self.coordinates, self.shards = list(names), coordinates, shards or {}
        self.capturable, self.reads_statistics = True, False
        self.graph = end_at_statistics(graph)
        self.by_name = cut_blocks(find_blocks(graph), self.shards)
        self.blocks: list[Block] = [block for name in self.names for block in self.by_name[name]]
        self._keys = [(name, k) for name in self.names for k in range(len(self.by_name[name]))]
        self.edges = {
            name: cut_edges(edge, self.shards.get(name, ()))
            for name, edge in unit_classes_of(self.graph).parameters.items()
            if bool((edge.head != FIXED).any()) or bool((edge.tail != FIXED).any())
        }
        self._placed: dict[torch.device, tuple[SizeTable, EdgeTable]] = {}
        self._subsets: dict[tuple[tuple[str, ...], torch.device], BlockSubset] = {}
        self._scales: dict[tuple[tuple[str, ...], torch.device], UnitScales] = {}

    def subset(self, names: Sequence[str], device: torch.device) -> BlockSubset:
        """The blocks of these parameters."""
        key = tuple(names), device
        if key not in self._subsets:
            chosen = set(names)
            index = [k for k, block in enumerate(self.blocks) if block.name in chosen]
            blocks = [self.blocks[k] for k in index]
            ratios = [block.ratio for block in blocks]
            shares = [1 / block.share for block in blocks]
            spectral = [ratio * block.orthogonal_norm for ratio, block in zip(ratios, blocks, strict=True)]
            self._subsets[key] = BlockSubset(
                tuple(names),
                blocks,
                [len(self.by_name[name]) for name in names],
                None if len(index) == len(self.blocks) else torch.tensor(index, device=device),
                ratios,
                torch.tensor(shares, dtype=torch.float64, device=device),
                torch.tensor(spectral, dtype=torch.float64, device=device),
            )
        return self._subsets[key]

    def unit_scales(self, names: Sequence[str], device: torch.device) -> UnitScales:
        """What keeps the scales of units in a step of these parameters."""
        key = tuple(names), device
        if key not in self._scales:
            self._scales[key] = UnitScales(self.graph, set(names), device)
        return self._scales[key]

    def rescale_(self, rescaling: Rescaling, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        """Rescales these parameters."""
        _, edges = self._place(rescaling.into.device)
        rescaling.apply_({name: w for name, w in zip(names, weights, strict=True) if name in edges}, edges)

    def adapt(self, graph: PathGraph) -> PathGraph:
        return end_at_statistics(graph)

    def run(
        self, graph: PathGraph, tensors: Tensors, p: float, exponents: bool | None
    ) -> RelativeCoordinates:
        own = {name: local_part(tensors[name]) for name in self.names}
        if self.coordinates == "paths":
            tensors = gather_vectors(graph, tensors)

        def measure(network: PoweredNetwork, check: RangeCheck | None) -> RelativeCoordinates:
            return self._measure(network, check, own)

        return measure_in_range(graph, tensors, p, measure, exponents)

    def measure(self, network: PoweredNetwork, check: RangeCheck | None) -> RelativeCoordinates:
        return self._measure(network, check, network.edges.tensors)

    def _measure(
        self, network: PoweredNetwork, check: RangeCheck | None, tensors: Tensors
    ) -> RelativeCoordinates:
        """``tensors`` is what this rank holds of the parameters."""
        dtype = network.arithmetic.dtype
        if self.coordinates == "weights":
            return self._divide_by_sizes(tensors, dtype, None, {})
        factors = measure_unit_factors(network, check)
        scales = self._keep_in_range(self._find_scales(factors, tensors))
        return self._divide_by_sizes(tensors, dtype, factors, scales)

    def _find_scales(self, factors: UnitFactors, tensors: Tensors) -> dict[str, _Scale]:
        """From the factors of the units at the ends of every parameter."""
        mantissa, exponent = factors.factor
        _, edges = self._place(mantissa.device)
        found = edges.look_up(mantissa, mantissa)
        own = {name: found[name] for name in self.names if name in found}
        heads, tails = [head for head, _ in own.values()], [tail for _, tail in own.values()]
        scales = multi_tensor("div", heads, tails)
        result = {name: _Scale(scale, *ends) for (name, ends), scale in zip(own.items(), scales, strict=True)}
        if exponent is None:
            return result
        exponents = edges.look_up_exponents(exponent)
        return {name: scale.with_exponent(exponents[name], tensors[name]) for name, scale in result.items()}

    @torch.no_grad()
    def _divide_by_sizes(
        self, tensors: Tensors, dtype: torch.dtype, factors: UnitFactors | None, scales: dict[str, _Scale]
    ) -> RelativeCoordinates:
        weights = {name: tensors[name].to(dtype) for name in self.names}
        products = multi_tensor("mul", [weights[n] for n in scales], [own.scale for own in scales.values()])
        z = {**weights, **dict(zip(scales, products, strict=True))}
        for name, scale in scales.items():
            if scale.exponent is not None:
                z[name] = exact_ldexp(z[name], scale.exponent)
        blocks = [block.of(z[block.name]) for block in self.blocks]
        norms = find_norms(self.blocks, blocks)
        exponents = factors is not None and factors.factor.exponent is not None
        shift = self._shifts(scales, norms.device) if exponents else None
        norms = norms if shift is None else exact_ldexp(norms, shift)
        size, turns, catch_up = self._place(norms.device)[0].measure(norms, factors)
        size = size if shift is None else exact_ldexp(size, -shift)
        one = {name: w.new_ones(()) for name, w in weights.items() if name not in scales}
        there = {**one, **{name: own.scale for name, own in scales.items()}}
        back = {**one, **{name: own.tail for name, own in scales.items()}}
        to_u = self._multiply(there, (1 / size).to(dtype), weights)
        from_u = self._multiply(back, size.to(dtype), weights)
        inverse = multi_tensor("div", [from_u[n] for n in scales], [own.head for own in scales.values()])
        from_u.update(zip(scales, inverse, strict=True))
        for name, scale in scales.items():
            if scale.exponent is not None:
                to_u[name] = exact_ldexp(to_u[name], scale.exponent)
                from_u[name] = exact_ldexp(from_u[name], -scale.exponent)
        units = None if factors is None else read_units(factors)
        return RelativeCoordinates(to_u, from_u, turns, catch_up, exponents, units)

    def _multiply(self, tensors: Tensors, values: Tensor, weights: Tensors) -> dict[str, Tensor]:
        """New tensors, in which every block is multiplied by its value. Those of one block keep their shape
        on a CPU, which expands to the weight's: multi-tensor kernels of a GPU take tensors of one shape."""
        if values.device.type != "cpu":
            tensors = {name: tensor.expand(weights[name].shape) for name, tensor in tensors.items()}
        of_block = dict(zip(self._keys, values.unbind(), strict=True))
        whole = [name for name in self.names if len(self.by_name[name]) == 1]
        products = multi_tensor("mul", [tensors[n] for n in whole], [of_block[n, 0] for n in whole])
        found = dict(zip(whole, products, strict=True))
        for name in self.names:
            if name not in found:
                found[name] = tensors[name].expand(weights[name].shape).clone()
                for k, block in enumerate(self.by_name[name]):
                    block.of(found[name]).mul_(of_block[name, k])
        return found

    def _keep_in_range(self, scales: dict[str, _Scale]) -> dict[str, _Scale]:
        """A deep network's z leave the range of floats: they are kept in units of the largest."""
        names = [name for name, scale in scales.items() if scale.shift is not None]
        if not names:
            return scales
        largest = torch.stack([scales[name].shift for name in names])  # type: ignore[misc]
        largest = reduce_over_ranks(largest, [self.shards.get(n, ()) for n in names], largest=True)
        shifts = torch.where(largest < -(1 << 20), 0, largest)  # all are zero
        shifted = {
            name: replace(scales[name], exponent=scales[name].exponent - shift, shift=shift)  # type: ignore[operator]
            for name, shift in zip(names, shifts.unbind(), strict=True)
        }
        return {**scales, **shifted}

    def _shifts(self, scales: dict[str, _Scale], device: torch.device) -> Tensor:
        zero = torch.zeros((), dtype=torch.int32, device=device)
        found = [scales[b.name].shift if b.name in scales else zero for b in self.blocks]
        return torch.stack([zero if shift is None else shift for shift in found]).clamp(-1000, 1000)

    def zero_noise_(self, grads: dict[str, Tensor]) -> Tensor:
        """Zeroes gradients of biases that are rounding and nothing else, as before a batch norm: a normalised
        step would blow them up. Returns the norms of all blocks' gradients."""
        if not grads:
            return torch.zeros(len(self.blocks), dtype=torch.float64)
        subset = self.subset(list(grads), next(iter(grads.values())).device)
        blocks = subset.blocks_of(grads)
        norms = find_norms(subset.blocks, blocks)
        if subset.index is not None:
            norms = norms.new_zeros(len(self.blocks)).index_copy(0, subset.index, norms)
        bound = NOISE * torch.finfo(blocks[0].dtype).eps
        noise = subset.of(self.find_noise(norms, bound))
        for block, own, zero in zip(subset.blocks, blocks, noise.unbind(), strict=True):
            if not block.turns:
                own.masked_fill_(zero, 0)
        return norms

    def find_noise(self, norms: Tensor, bound: float) -> Tensor:
        """Which blocks' gradients are rounding, given the norms of all."""
        return self._place(norms.device)[0].find_noise(norms, bound)

    def _place(self, device: torch.device) -> tuple[SizeTable, EdgeTable]:
        """What is needed on a device, put there once: a CUDA graph cannot capture the transfer."""
        if device not in self._placed:
            self._placed[device] = SizeTable(self.blocks, device), EdgeTable(self.edges, device)
        return self._placed[device]


@dataclass(frozen=True)
class _Scale:
    """z = w * scale * 2^exponent of one parameter, in units of 2^shift; scale = head / tail. Before these
    units are chosen, shift is the binary exponent of the largest z."""

    scale: Tensor
    head: Tensor
    tail: Tensor
    exponent: Tensor | None = None
    shift: Tensor | None = None

    def with_exponent(self, exponent: Tensor, weight: Tensor) -> _Scale:
        """With the binary exponent of the scale."""
        _, own = exact_frexp(weight.detach().to(self.scale.dtype))
        total = exponent.expand(weight.shape)
        largest = (own + total).amax() if weight.numel() else exponent.new_full((), DEAD)
        return replace(self, exponent=total, shift=largest)
