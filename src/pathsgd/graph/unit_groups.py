"""The incoming weights of every unit: the groups over which mu_{p,q} is taken.

A unit is where weighted edges meet: everything summed into one place by additions that nothing else
reads is one unit, as in the paper's graph. So a bias belongs to its linear layer, both matrices
and both biases of a recurrence belong to its hidden unit, and the three edges of a batch norm to its
affine output. A convolution's channel is one unit, not one per place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pathsgd.graph.edge_weights import Tensors, signed_weights
from pathsgd.graph.nodes import Add, Conv, Linear, Multiply, Shape, Source
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.unit_classes import UnitClasses


@dataclass(frozen=True)
class Part:
    """One operation's share of the weights into a group of units."""

    node: int
    operation: Linear | Conv | Multiply | Source
    layout: Shape
    """The shape in which this part's rows lie, broadcastable to the units' layout."""
    units: Shape
    """The layout of the group: a shape that broadcasts to the value's."""

    def rows(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        """The signed weights, one row per unit."""
        weight = signed_weights(self.operation.weight, tensors, dtype).to(dtype)
        return self._spread(self._by_unit(weight))

    def entries(self, shape: Shape) -> Tensor:
        """Which entry of the parameter, of that shape, each weight of this part's own rows is."""
        weight = self.operation.weight
        assert weight.parameter is not None
        numbers = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
        plain = replace(weight, factors=(), parameter=replace(weight.parameter, shift=0.0))
        numbers = signed_weights(plain, {weight.parameter.name: numbers}, numbers.dtype)
        return self._by_unit(numbers.expand(weight.shape)).long()

    def row_of_unit(self) -> Tensor | None:
        """The own row that leads into each unit; None where there is one for each, in their order."""
        if math.prod(self.layout) == math.prod(self.units):
            return None
        return torch.arange(math.prod(self.layout)).reshape(self.layout).expand(self.units).flatten()

    def tails(self, units: UnitClasses) -> Tensor:
        """The class each weight of ``rows`` comes from; one row if all units have the same."""
        edge = units.edges[self.node]
        if (own := self._uncovered(units)) is not None:
            return own[:, None]
        if isinstance(self.operation, Linear):
            return edge.tail.expand(1, self.operation.weight.shape[1])
        shape = self.operation.weight.shape
        if isinstance(self.operation, Conv) and not self.operation.transposed:
            return self._spread(_lay_out(edge.tail, shape).flatten(1))
        return self._spread(self._by_unit(_lay_out(edge.tail, shape)))

    def heads(self, units: UnitClasses) -> Tensor:
        """The class of every unit of the group."""
        edge = units.edges[self.node]
        if (own := self._uncovered(units)) is not None:
            return own
        if isinstance(self.operation, Linear):
            head = edge.head.expand(self.operation.weight.shape[0], 1)
        else:
            head = self._by_unit(_lay_out(edge.head, self.operation.weight.shape))[:, :1]
        return self._spread(head).flatten()

    def _uncovered(self, units: UnitClasses) -> Tensor | None:
        """The classes of units that share one weight between them and each keep their own factor."""
        ids = units.uncovered.get(self.node)
        if ids is None or any(n > m for n, m in zip(ids.shape, self.units, strict=True)):
            return None
        return ids.expand(self.units).flatten()

    def _by_unit(self, weight: Tensor) -> Tensor:
        match self.operation:
            case Linear():
                return weight
            case Conv():
                return by_output(self.operation, weight).flatten(1)
            case _:
                return weight.reshape(-1, 1)

    def _spread(self, rows: Tensor) -> Tensor:
        """Rows repeated where the group has more units than this part has rows."""
        index = self.row_of_unit()
        return rows if index is None else rows[index.to(rows.device)]


def _lay_out(ids: Tensor, shape: Shape) -> Tensor:
    """Classes by entry of a weight of that shape; those of a convolution in groups have an axis of groups."""
    if ids.dim() > len(shape):
        return ids.expand(len(ids), shape[0] // len(ids), *shape[1:]).reshape(shape)
    return ids.expand(shape)


@dataclass(frozen=True)
class Group:
    """Units that the same operations lead into."""

    parts: tuple[Part, ...]

    def heads(self, units: UnitClasses) -> Tensor:
        """The class of every unit, from the part that knows them best."""
        return max(self.parts, key=lambda part: math.prod(part.layout)).heads(units)


def find_unit_groups(graph: PathGraph) -> list[Group]:
    """The groups of units that have trainable incoming weights, each weight in exactly one use."""
    readers = graph.readers()

    def root(k: int) -> int:
        while k not in graph.ends and len(readers[k]) == 1:
            (after,) = readers[k]
            if not isinstance(graph.nodes[after].operation, Add):
                break
            k = after
        return k

    members_of: dict[int, list[int]] = {}
    for k, weight in graph.weights():
        if weight.parameter is not None:
            members_of.setdefault(root(k), []).append(k)
    # The same weights at another time, or at another call of a module, are the same units; the first
    # step of a recurrence, which lacks the weights from its state, is part of the others.
    distinct: dict[frozenset[tuple[str, ...]], list[int]] = {}
    for members in members_of.values():
        distinct.setdefault(frozenset(_identity(graph, k) for k in members), members)
    containing: dict[tuple[str, ...], list[frozenset[tuple[str, ...]]]] = {}
    for names in distinct:
        for name in names:
            containing.setdefault(name, []).append(names)
    return [
        _group(graph, members) for names, members in distinct.items()
        if not any(names < others for others in containing[next(iter(names))])
    ]  # fmt: skip


def _identity(graph: PathGraph, k: int) -> tuple[str, ...]:
    """The key that makes two uses of a weight the same edges: the operation and everything multiplied."""
    operation = graph.nodes[k].operation
    assert isinstance(operation, (Linear, Conv, Multiply, Source))
    parameter = operation.weight.parameter
    assert parameter is not None
    factors = tuple(map(repr, operation.weight.factors))
    return (type(operation).__name__, parameter.name, repr(parameter.views), *factors)


def _group(graph: PathGraph, members: list[int]) -> Group:
    layouts = []
    for k in members:
        node = graph.nodes[k]
        operation = node.operation
        ndim = len(node.shape)
        match operation:
            case Linear(weight):
                layouts.append((1,) * (ndim - 1) + (weight.shape[0],))
            case Conv():
                layouts.append((1, node.shape[1]) + (1,) * (ndim - 2))
            case Multiply(weight) | Source(weight):
                layouts.append((1,) * (ndim - len(weight.shape)) + weight.shape)
            case _:
                raise AssertionError(f"{operation} has no weights")
    ndim = max(map(len, layouts))
    padded = [(1,) * (ndim - len(layout)) + layout for layout in layouts]
    units = torch.broadcast_shapes(*dict.fromkeys(padded))
    return Group(
        tuple(
            Part(k, graph.nodes[k].operation, layout, units)  # type: ignore[arg-type]
            for k, layout in zip(members, padded, strict=True)
        )
    )


def by_output(operation: Conv, weight: Tensor) -> Tensor:
    """The weight with its output channels on axis 0: ``(outputs, inputs / groups, *taps)``."""
    if not operation.transposed:
        return weight
    g = operation.groups
    inputs, outputs, *taps = weight.shape
    grouped = weight.reshape(g, inputs // g, outputs, *taps).transpose(1, 2)
    return grouped.reshape(g * outputs, inputs // g, *taps)
