"""Were plain floats enough? If not, the pass is run again with exponents."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from pathsgd._torch import is_forward_mode
from pathsgd.geometry.checked_nodes import BEGIN, PRODUCTS, checked_nodes
from pathsgd.geometry.edge_weights import Tensors, signed_weights
from pathsgd.geometry.extended_float import Arithmetic, Bounds, ExtendedFloat, safe_bounds
from pathsgd.geometry.extended_float import safe_range as safe_range
from pathsgd.geometry.operations.apply import adjoint, apply
from pathsgd.geometry.passes import PoweredNetwork, Values, powered_network
from pathsgd.geometry.precision import full_precision
from pathsgd.graph.nodes import Source, Weight, Weighted
from pathsgd.graph.path_graph import PathGraph

T = TypeVar("T")

_log = logging.getLogger(__name__)
_announced: weakref.WeakSet[PathGraph] = weakref.WeakSet()
_near_the_end: weakref.WeakKeyDictionary[PathGraph, set[float]] = weakref.WeakKeyDictionary()
"""By graph, the orders p whose path weights fit plain floats with little room."""

CHECK_EVERY = 16
"""Steps between two checks where the host would wait for a GPU."""
ROOM = 32
"""By how many powers of two path weights may grow between two checks."""


def is_due(count: int) -> bool:
    """Whether to check after so many steps. At first every time: path weights grow by up to 2^50 while
    running statistics settle."""
    return count < CHECK_EVERY or count % CHECK_EVERY == 0


Extremes = list[list[float]]
"""The least and the largest numbers that a check has seen, in its order."""

Looked = tuple[int, bool, Tensor, Tensor]
"""A place (node, forward), and the least and the largest number there."""

Suspects = set[tuple[int, bool, float]]
"""Places (node, forward, bound) where something is below the bound, or is zero."""


@dataclass
class RangeCheck:
    """Records the extremes of a pass as it goes, and compares them with the safe range once, at the end."""

    network: PoweredNetwork
    looked: list[Looked] = field(default_factory=list)
    factors: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """Of what gamma_in and gamma_out of a parameter are multiplied by."""
    has_room: bool = True
    """Whether the last numbers left some room to what plain floats are trusted with."""

    def __post_init__(self) -> None:
        self._nodes = checked_nodes(self.network.graph)
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def see(self, k: int, value: ExtendedFloat, forward: bool) -> None:
        mantissa = value.mantissa
        if k not in (self._nodes.forward if forward else self._nodes.backward) or not mantissa.numel():
            return
        operation = self.network.graph.nodes[k].operation
        if forward and isinstance(operation, Source):
            # A bias of zero is common and no reason for exponents.
            arithmetic, weight = self.network.edges.for_operation(k)
            assert weight is not None
            power = arithmetic.power(weight.to(arithmetic.dtype))
            mantissa = torch.where(self.network.edges.signed(k) == 0, 1, power)
        if mantissa.requires_grad or is_forward_mode():
            mantissa = mantissa.detach()
        self.looked.append((k, forward, *self._find_extremes(mantissa)))
        if not forward and isinstance(operation, Weighted):
            self._see_factors(k, operation.weight)

    def _find_extremes(self, mantissa: Tensor) -> tuple[Tensor, Tensor]:
        """What flows back from a sum is the same for all that was added."""
        if self._last is None or self._last[0] is not mantissa:
            self._last = mantissa, torch.aminmax(mantissa)
        return self._last[1]

    def _see_factors(self, k: int, weight: Weight) -> None:
        edges, arithmetic = self.network.edges, self.network.arithmetic
        if weight.parameter is None or not weight.factors:
            return
        power = edges.factor_power(k)
        if power is None:
            return
        mantissa = power.mantissa
        if any(factor.inverse_sigma is None for factor in weight.factors):
            # It may be zero, as a running mean or a mask.
            factors = signed_weights(replace(weight, parameter=None), edges.tensors, arithmetic.dtype)
            mantissa = torch.where(factors == 0, 1, mantissa)
        self.factors.append((k, *torch.aminmax(mantissa)))

    def passed(self) -> bool:
        """Whether plain floats were enough."""
        return not self.looked or self.accepts(self.extremes().tolist())

    @torch.no_grad()
    def accepts(self, extremes: Extremes) -> bool:
        """The same, if these are the extremes of what was looked at."""
        suspects = self.suspects(extremes)
        passed = suspects is not None and (not suspects or self._only_dead(sorted(suspects)))
        if not passed:
            self._announce(extremes)
        return passed

    def _announce(self, extremes: Extremes) -> None:
        """Says once for a graph that exponents are used from now on: they take longer."""
        graph = self.network.traced
        if graph in _announced:
            return
        _announced.add(graph)
        least, largest = (row[: len(self.looked)] for row in extremes)
        _log.warning(
            "the path weights of %s (from %.1e to %.1e) leave what %s is trusted with, so they are computed "
            "with an exponent for every unit: exact, and several times as long",
            graph.model, min(filter(None, least), default=0.0), max(largest), self.network.arithmetic.dtype,
        )  # fmt: skip

    def extremes(self) -> Tensor:
        """The least and the largest numbers seen, still on the device: [2, places]."""
        seen = [*(x[-2:] for x in self.looked), *(x[-2:] for x in self.factors)]
        return torch.stack([*(least for least, _ in seen), *(largest for _, largest in seen)]).reshape(2, -1)

    def suspects(self, extremes: Extremes) -> Suspects | None:
        """Where something is too small, or is zero; None if a number is too large, or gamma_in times
        gamma_out is out of range. Remembers whether there is room."""
        arithmetic = self.network.arithmetic
        bounds = safe_bounds(arithmetic.dtype, arithmetic.order)
        forward_alone = all(forward for _, forward, *_ in self.looked)
        if forward_alone:
            # What a derivative will be multiplied by, of all that leaves the units, is not known.
            bounds = bounds._replace(largest=math.log2(safe_range(arithmetic.dtype)[2]))
            if _are_between(extremes, bounds):
                return set()
        pairs = [(_log2(least), _log2(largest)) for least, largest in zip(*extremes, strict=True)]
        seen, factors = pairs[: len(self.looked)], pairs[len(self.looked) :]
        top = max([0.0, *(largest for _, largest in seen)])
        room = bounds.largest - top
        if room < 0:
            return None
        least_sum = bounds.least_sum(top)
        found = set()
        trusted: dict[tuple[int, bool], tuple[float, float]] = {(BEGIN, True): (0.0, 0.0)}
        for (k, forward, *_), (least, largest) in zip(self.looked, seen, strict=True):
            single = forward and isinstance(self.network.graph.nodes[k].operation, PRODUCTS)
            bound = bounds.least_product if single else least_sum
            if least == -math.inf:
                # How small the rest is does not show, nor whether what it is multiplied by is as small.
                bound = max(bound, -bounds.gamma / 2)
            if least < bound:
                found.add((k, forward, 2.0**bound))
            trusted[k, forward] = max(least, bound), largest
        if forward_alone:
            return found
        by_node = {k: factor for (k, *_), factor in zip(self.factors, factors, strict=True)}
        for into, k, terms in self._nodes.products:
            arriving = [trusted[source, True] for source in into if (source, True) in trusted]
            if not arriving or (k, False) not in trusted:
                continue  # nothing arrives, or no path leads on
            least = min(least for least, _ in arriving) + trusted[k, False][0]
            largest = max(largest for _, largest in arriving) + trusted[k, False][1] + terms
            smaller, larger = by_node.get(k, (0.0, 0.0))
            room = min(room, bounds.gamma - max(largest, larger, largest + larger))
            if room < 0 or min(least, least + smaller) < -bounds.gamma:
                return None
        self.has_room = room >= ROOM
        self._remember()
        return found

    def _remember(self) -> None:
        near = _near_the_end.setdefault(self.network.traced, set())
        if self.has_room:
            near.discard(self.network.arithmetic.p)
        else:
            near.add(self.network.arithmetic.p)

    def _only_dead(self, suspects: list[tuple[int, bool, float]]) -> bool:
        """Whether what is out of range is zero, and rightly so: no path reaches those units."""
        # Rare enough that the passes are run again rather than kept in memory.
        gradients: Values = {}
        arrived = {k for k, forward, _ in suspects if forward}
        values = dict(self.network.forward(arrived | self.network.needed_by_backward()))
        if not all(forward for _, forward, _ in suspects):
            gradients = dict(self.network.backward(dict(values)))
        for k, forward, low in suspects:
            m = (values[k] if forward else gradients[k]).mantissa
            if bool(((m > 0) & (m < low)).any()):
                return False
            if self._lost_forward(k, values) if forward else self._lost_backward(k, values, gradients):
                return False
        return True

    def _lost_forward(self, k: int, values: Values) -> bool:
        """Whether a unit of node k that paths reach was computed to be zero."""
        node = self.network.graph.nodes[k]
        plain = Arithmetic(1.0, self.network.arithmetic.dtype)
        alive = [self._alive(source, values, plain) for source in node.inputs]
        reached = apply(plain, node.operation, alive, self._nonzero(k), node.shape, self.network.device)
        return bool(((reached.mantissa > 0) & (values[k].mantissa == 0)).any())

    def _alive(self, k: int, values: Values, plain: Arithmetic) -> ExtendedFloat:
        """Which units of node k paths reach. What was not looked at may be zero for being too small."""
        node = self.network.graph.nodes[k]
        if k not in self._nodes.summands:
            return _indicator(values[k].mantissa, plain)
        inputs = [self._alive(source, values, plain) for source in node.inputs]
        return apply(plain, node.operation, inputs, self._nonzero(k), node.shape, self.network.device)

    def _lost_backward(self, k: int, values: Values, gradients: Values) -> bool:
        """The same question for what flows back into node k from its readers."""
        plain = Arithmetic(1.0, self.network.arithmetic.dtype)
        nodes = self.network.graph.nodes
        for reader in self.network.graph.readers()[k]:
            if reader not in gradients:
                continue
            node = nodes[reader]
            shapes = [nodes[source].shape for source in node.inputs]
            alive = _indicator(gradients[reader].mantissa, plain)
            weight = self._nonzero(reader)
            back = adjoint(plain, node.operation, alive, weight, shapes, values.get(node.inputs[0]))
            for source, flowed in zip(node.inputs, back, strict=True):
                if source == k and bool(((flowed.mantissa > 0) & (gradients[k].mantissa == 0)).any()):
                    return True
        return False

    def _nonzero(self, k: int) -> Tensor | None:
        """1 for every weight of node k that is not zero."""
        if not isinstance(self.network.graph.nodes[k].operation, Weighted):
            return None
        return (self.network.edges.signed(k) != 0).to(self.network.arithmetic.dtype)


def has_room(graph: PathGraph, p: float) -> bool:
    """Whether the last check of a graph left some room, for steps that cannot be checked."""
    return p not in _near_the_end.get(graph, ())


def run_forward(network: PoweredNetwork, check: RangeCheck | None, also: Iterable[int] = ()) -> Values:
    """gamma_in of the nodes that the backward pass and gamma ask for, and of those in ``also``; a check is
    shown all of them."""
    needed = network.needed_by_backward().union(also)
    gamma_in: Values = {}
    for k, value in network.forward(needed):
        if k in needed:
            gamma_in[k] = value
        if check is not None:
            check.see(k, value, forward=True)
    return gamma_in


Measure = Callable[[PoweredNetwork, RangeCheck | None], T]
"""Runs the passes over a network and shows a check, if there is one, the numbers as they come."""


def measure_in_range(
    graph: PathGraph, tensors: Tensors, p: float, measure: Measure[T], exponents: bool | None = None
) -> T:
    """What ``measure`` finds, in plain floats or with an exponent per unit: exact at any depth and imbalance,
    and slower. By default plain floats are tried first, and exponents if anything came near the end of their
    range."""
    network = powered_network(graph, tensors, p)
    with full_precision(network.device):
        if not exponents:
            check = None if exponents is False else RangeCheck(network)
            found = measure(network, check)
            if check is None or check.passed():
                return found
        return measure(powered_network(graph, tensors, p, exponents=True), None)


def _are_between(extremes: Extremes, bounds: Bounds) -> bool:
    """Whether no number is near a bound, whatever it is: as nearly always."""
    least, largest = extremes
    top = 2.0**bounds.largest
    if not all(x <= top for x in largest):  # nor is nan
        return False
    low = 2.0 ** max(bounds.least_product, bounds.least_sum(_log2(max(1.0, *largest))))
    return all(x >= low for x in least)


def _log2(x: float) -> float:
    if x > 0:
        return math.log2(x)
    return math.inf if math.isnan(x) else -math.inf  # nothing is known of nan


def _indicator(x: Tensor, arithmetic: Arithmetic) -> ExtendedFloat:
    return ExtendedFloat((x > 0).to(arithmetic.dtype))
