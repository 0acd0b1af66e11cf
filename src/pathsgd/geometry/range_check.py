"""Were plain floats enough? If not, the pass is run again with exponents."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat
from pathsgd.geometry.extended_float import safe_range as safe_range
from pathsgd.geometry.operations.apply import adjoint, apply
from pathsgd.geometry.passes import PoweredNetwork, Values, powered_network
from pathsgd.geometry.precision import full_precision
from pathsgd.graph.nodes import Add, AxisMap, Conv, Linear, Multiply, Reduce, Source, Square, Weighted
from pathsgd.graph.path_graph import PathGraph

T = TypeVar("T")

_log = logging.getLogger(__name__)
_announced: weakref.WeakSet[PathGraph] = weakref.WeakSet()

PRODUCTS = (Source, Multiply, Square)
SUMS = (Linear, Conv, Add, AxisMap, Reduce)


@dataclass
class RangeCheck:
    """Records the extremes of a pass as it goes, and compares them with the safe range once, at the end."""

    network: PoweredNetwork
    looked: list[tuple[int, bool, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph = self.network.graph
        adds = {k for k, node in enumerate(graph.nodes) if isinstance(node.operation, Add)}
        self._summands: set[int] = set()
        for k, readers in enumerate(graph.readers()):
            # Of a chain of sums every second one is looked at.
            of_sum = k in adds and not self._summands.isdisjoint(adds.intersection(graph.nodes[k].inputs))
            if readers and adds.issuperset(readers) and k not in graph.ends and not of_sum:
                self._summands.add(k)

    def see(self, k: int, value: ExtendedFloat, forward: bool) -> None:
        operation = self.network.graph.nodes[k].operation
        if not isinstance(operation, (*PRODUCTS, *SUMS)) or not value.mantissa.numel():
            return
        if forward and k in self._summands:
            return  # what is too small to matter in a sum may be lost; the sum is looked at
        mantissa = value.mantissa
        if forward and isinstance(operation, Source):
            # A bias of zero is common and no reason for exponents.
            arithmetic, weight = self.network.edges.for_operation(k)
            assert weight is not None
            power = arithmetic.power(weight.to(arithmetic.dtype))
            mantissa = torch.where(self.network.edges.signed(k) == 0, 1, power)
        self.looked.append((k, forward, *torch.aminmax(mantissa)))

    def passed(self) -> bool:
        if not self.looked:
            return True
        extremes = self.extremes().tolist()
        suspects = self.suspects(extremes)
        passed = suspects is not None and (not suspects or self._only_dead(sorted(suspects)))
        if not passed:
            self._announce(extremes)
        return passed

    def _announce(self, extremes: list[list[float]]) -> None:
        """Says once for a graph that exponents are used from now on: they take longer."""
        graph = self.network.traced
        if graph in _announced:
            return
        _announced.add(graph)
        least = min(filter(None, extremes[0]), default=0.0)
        _log.warning(
            "the path weights of %s (from %.1e to %.1e) leave what %s is trusted with, so they are computed "
            "with an exponent for every unit: exact, and up to three times as long",
            graph.model, least, max(extremes[1]), self.network.arithmetic.dtype,
        )  # fmt: skip

    def extremes(self) -> Tensor:
        """The least and the largest numbers seen, still on the device: [2, places]."""
        least, largest = [x for *_, x, _ in self.looked], [x for *_, x in self.looked]
        return torch.stack([*least, *largest]).reshape(2, -1)

    def suspects(self, extremes: list[list[float]]) -> set[tuple[int, bool, float]] | None:
        """The places (node, forward, bound) where something is too small, or is zero; None if anything is
        too large."""
        product, total, high = safe_range(self.network.arithmetic.dtype)
        largest = max([1.0, *extremes[1]], key=lambda x: x if x == x else math.inf)
        if not largest <= high:
            return None
        # Where no number is that large, sums may be smaller; in steps, so that the bound seldom changes.
        total *= 2.0 ** (-15 * (math.log2(high / largest) // 15))
        found = set()
        for (k, forward, *_), least in zip(self.looked, extremes[0], strict=True):
            single = forward and isinstance(self.network.graph.nodes[k].operation, PRODUCTS)
            low = product if single else total
            if not least >= low:
                found.add((k, forward, low))
        return found

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
        if k not in self._summands:
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


def _indicator(x: Tensor, arithmetic: Arithmetic) -> ExtendedFloat:
    return ExtendedFloat((x > 0).to(arithmetic.dtype))
