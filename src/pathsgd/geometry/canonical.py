"""The canonical equivalent of a network: of all its rescalings, the one in which as much arrives at every
unit over paths as leaves it.

Let ``a_in(u)`` be the l_p norm of the paths that arrive at a unit and ``a_out(u)`` that of the paths that
leave it. A rescaling by s multiplies the first by s and divides the second by it, and no other unit's factor
enters either of them. So the factor that makes them equal is known at once, ``c_u = sqrt(a_out / a_in)``, and

    z = w c_head / c_tail

of every weight is the same for all rescalings of a network: another set of invariant coordinates beside
``w sqrt(gamma)``. It has one number for each unit, so the inside of a convolution's kernel is left as it is,
and a unit that hardly any path uses is small in z on both of its sides instead of large in its steps.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.geometry.extended_float import DEAD, Arithmetic, ExtendedFloat, exact_ldexp
from pathsgd.geometry.passes import PoweredNetwork, Values
from pathsgd.geometry.range_check import RangeCheck, run_forward
from pathsgd.graph.folding import put
from pathsgd.graph.nodes import Shape
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.unit_classes import FIXED, unit_classes_of

LEAST = 20
"""A unit that few paths use counts as 2^-LEAST of its layer's mean at least, so that its step is finite."""


@dataclass(frozen=True)
class UnitFactors:
    """What takes every class of units to the canonical equivalent, as ``mantissa * 2^exponent``."""

    factor: ExtendedFloat
    magnitude: ExtendedFloat
    """``a_in`` in the canonical equivalent, which is ``a_out`` there. It is invariant."""
    presence: Tensor
    """``magnitude`` before it was kept from 0, beside the mean of the layer; 0 if the class cannot be
    rescaled. It is invariant."""


@dataclass(frozen=True)
class Places:
    """Where the classes of a graph are found among the values that weights read, on one device."""

    read: dict[int, Shape]
    """The nodes that are read, each with the shape of its units: size one along axes on which they do not
    change."""
    index: Tensor
    """By class, its places in the list of all these units; the place after the last one is empty."""
    count: Tensor
    """By class, the number of its places."""
    layers: Tensor
    """By node in ``read``, the classes first met there; the number of classes stands for none."""
    layer: Tensor
    """By class, its number in ``layers``."""
    squared: Tensor | None
    """By class, whether what is read is quadratic in its factor; None if nothing is."""
    fixed: Tensor
    """By class, whether it cannot be rescaled."""


_found: weakref.WeakKeyDictionary[PathGraph, dict[torch.device, Places]] = weakref.WeakKeyDictionary()


def places_of(graph: PathGraph, device: torch.device) -> Places:
    """The places of a graph's classes, found once: a CUDA graph cannot capture their transfer."""
    by_device = _found.setdefault(graph, {})
    if device not in by_device:
        by_device[device] = _find_places(graph, device)
    return by_device[device]


def _find_places(graph: PathGraph, device: torch.device) -> Places:
    units = unit_classes_of(graph)
    degree = torch.ones(units.count, dtype=torch.int64)
    for ids, power in units.read.values():
        degree[ids.flatten()] = degree[ids.flatten()].clamp(min=power)
    read: dict[int, Shape] = {}
    positions: list[list[int]] = [[] for _ in range(units.count)]
    layers: list[list[int]] = []
    layer = torch.zeros(units.count, dtype=torch.int64)
    start = 0
    for k, (ids, power) in units.read.items():
        if not bool((ids != FIXED).any()):
            continue
        read[k] = tuple(ids.shape)
        first_met = []
        for place, unit in enumerate(ids.flatten().tolist(), start):
            if unit == FIXED or int(degree[unit]) != power:
                continue
            if not positions[unit]:
                first_met.append(unit)
                layer[unit] = len(layers)
            positions[unit].append(place)
        layers.append(first_met)
        start += ids.numel()
    count = torch.tensor([max(1, len(own)) for own in positions])
    fixed = torch.arange(units.count) == FIXED
    squared = (degree > 1).to(device) if bool((degree > 1).any()) else None
    return Places(
        read, _pad(positions, start).to(device), count.to(device), _pad(layers, units.count).to(device),
        layer.to(device), squared, fixed.to(device),
    )  # fmt: skip


def _pad(lists: list[list[int]], empty: int) -> Tensor:
    width = max(map(len, lists), default=0)
    return torch.tensor([row + [empty] * (width - len(row)) for row in lists], dtype=torch.int64).reshape(
        len(lists), width
    )


def measure_unit_factors(network: PoweredNetwork, check: RangeCheck | None) -> UnitFactors:
    """Both passes, and the factors from what arrives at the units and what leaves them."""
    places = places_of(network.traced, network.device)
    number = {network.folded.place[k]: k for k in places.read}
    gamma_in = run_forward(network, check, number)
    arriving = {k: gamma_in[place] for place, k in number.items()}
    leaving: Values = {}
    for place, value in network.backward(gamma_in):
        if place in number:
            leaving[number[place]] = value
        if check is not None:
            check.see(place, value, forward=False)
    a_in = _collect(network, places, arriving, forward=True)
    a_out = _collect(network, places, leaving, forward=False)
    return _factors(network.arithmetic, places, a_in, a_out)


def _collect(
    network: PoweredNetwork, places: Places, values: Mapping[int, ExtendedFloat], forward: bool
) -> ExtendedFloat:
    """The l_p mean over all places of every class, as ``mantissa * 2^exponent``."""
    arithmetic, maximum = network.arithmetic, math.isinf(network.arithmetic.p)
    empty = torch.zeros(1, dtype=arithmetic.dtype, device=network.device)
    dead = torch.full_like(empty, DEAD, dtype=torch.int32)
    mantissas, exponents = [], []
    for k, units in places.read.items():
        size = math.prod(units)
        if k not in values:
            mantissas.append(empty.expand(size))
            exponents.append(dead.expand(size))
            continue
        value, found = values[k], tuple(values[k].mantissa.shape)
        # Equal places are one: what arrives at them is the same, what leaves them is added up already.
        summed = found if forward else network.traced.nodes[k].shape
        if forward and not maximum:
            for d, counts in network.folded.counts.get(network.folded.place[k], {}).items():
                counted = _place_counts(counts, len(found) - 1 - d, arithmetic.dtype, network.device)
                value = ExtendedFloat(value.mantissa * counted, value.exponent)
                summed = put(summed, d, sum(counts))
        value = arithmetic.reduce(value, [d for d, n in enumerate(units) if n < found[d]])
        repeated = 1 if maximum else math.prod(summed) // size
        mantissas.append((value.mantissa / repeated).flatten())
        if value.exponent is not None:
            exponents.append(value.exponent.expand(units).flatten())
    mantissa = torch.cat([*mantissas, empty])[places.index]
    exponent = torch.cat([*exponents, dead])[places.index] if arithmetic.exponents else None
    if not places.index.shape[1]:  # nothing can be rescaled
        return ExtendedFloat(
            empty.expand(len(places.index)), dead.expand(len(places.index)) if arithmetic.exponents else None
        )
    total = arithmetic.reduce(ExtendedFloat(mantissa, exponent), [1])
    mean = total.mantissa[:, 0] if maximum else total.mantissa[:, 0] / places.count
    return ExtendedFloat(arithmetic.root(mean), None if total.exponent is None else total.exponent[:, 0])


@functools.cache
def _place_counts(counts: Shape, after: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The counts as a tensor that broadcasts along an axis followed by ``after`` others. Kept: a CUDA graph
    cannot capture their transfer, and reads them in every replay."""
    return torch.tensor(counts, dtype=dtype, device=device).reshape(-1, *(1,) * after)


def _factors(
    arithmetic: Arithmetic, places: Places, a_in: ExtendedFloat, a_out: ExtendedFloat
) -> UnitFactors:
    """``c = K / a_in`` with ``K = sqrt(a_in a_out)``, kept from 0."""
    linear = Arithmetic(1.0, arithmetic.dtype, arithmetic.exponents)  # one step of an exponent is 2 from here
    through = _root(linear.multiply(a_in, a_out))
    mean = _mean_of_layer(linear, places, through)
    one = linear.ones(mean.mantissa.shape, mean.mantissa.device)
    presence = _ratio(through, mean)
    magnitude = _where(presence < 2.0**-LEAST, linear.multiply(mean, _least(linear, mean)), through)
    # A unit that no path passes is treated as the others of its layer are.
    magnitude = _where(through.mantissa > 0, magnitude, _where(mean.mantissa > 0, mean, one))
    factor = _where(a_out.mantissa > 0, _divide(a_out, magnitude), one)
    factor = _where(a_in.mantissa > 0, _divide(magnitude, a_in), factor)
    if places.squared is not None:
        factor = _where(places.squared, _root(factor), factor)
    return UnitFactors(
        _where(places.fixed, one, factor),
        _where(places.fixed, one, magnitude),
        torch.where(places.fixed, 0, presence),
    )


def _least(linear: Arithmetic, like: ExtendedFloat) -> ExtendedFloat:
    return ExtendedFloat(
        torch.full_like(like.mantissa, 2.0**-LEAST),
        None if like.exponent is None else torch.zeros_like(like.exponent),
    )


def _mean_of_layer(linear: Arithmetic, places: Places, through: ExtendedFloat) -> ExtendedFloat:
    """The mean over the classes of the same layer, by class."""
    if not places.layers.numel():
        return through
    mantissa = torch.cat([through.mantissa, through.mantissa.new_zeros(1)])[places.layers]
    exponent = None
    if through.exponent is not None:
        exponent = torch.cat([through.exponent, through.exponent.new_full((1,), DEAD)])[places.layers]
    total = linear.reduce(ExtendedFloat(mantissa, exponent), [1])
    live = (mantissa > 0).sum(1).clamp(min=1)
    mean = (total.mantissa[:, 0] / live)[places.layer]
    return ExtendedFloat(mean, None if total.exponent is None else total.exponent[:, 0][places.layer])


def _where(condition: Tensor, x: ExtendedFloat, y: ExtendedFloat) -> ExtendedFloat:
    exponent = None
    if x.exponent is not None and y.exponent is not None:
        exponent = torch.where(condition, x.exponent, y.exponent)
    return ExtendedFloat(torch.where(condition, x.mantissa, y.mantissa), exponent)


def _divide(x: ExtendedFloat, y: ExtendedFloat) -> ExtendedFloat:
    """x / y, and x where y is 0."""
    exponent = None
    if x.exponent is not None and y.exponent is not None:
        exponent = x.exponent - torch.where(y.mantissa > 0, y.exponent, 0)
    return ExtendedFloat(x.mantissa / torch.where(y.mantissa > 0, y.mantissa, 1), exponent)


def _ratio(x: ExtendedFloat, y: ExtendedFloat) -> Tensor:
    """x / y as a plain float, which may be 0."""
    mantissa, exponent = _divide(x, y)
    return mantissa if exponent is None else exact_ldexp(mantissa, exponent.clamp(-1000, 1000))


def _root(x: ExtendedFloat) -> ExtendedFloat:
    """The square root, exact under powers of two."""
    if x.exponent is None:
        return ExtendedFloat(x.mantissa.sqrt())
    half = torch.div(x.exponent, 2, rounding_mode="floor")
    return ExtendedFloat(exact_ldexp(x.mantissa, x.exponent - 2 * half).sqrt(), half)
