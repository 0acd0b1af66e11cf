"""Writes a PathGraph node by node: what the rules call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from pathsgd.graph import nodes
from pathsgd.graph.nodes import Conv, Node, Operation, Shape, Stored, View, Weight, Window, number
from pathsgd.graph.views import view_shape


@dataclass(frozen=True)
class Paths:
    """A value that carries paths: a node of the graph."""

    node: int
    mixes: bool = False
    """The value is a softmax over its last axis: weights that sum to one."""


@dataclass(frozen=True)
class Unknown:
    """A value without paths that is no plain weight: a mask, an index, a weight computed from others."""

    shape: Shape
    floating: bool
    reason: str
    parameters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Choice(Unknown):
    """For each entry along the first axis one of several matrices of a parameter, which the input chooses:
    those of experts."""

    weight: Weight | None = None


Value = Paths | Weight | Unknown
MASK = "a mask"
"""The reason of a value that is true or false whatever rescaling: a product with it may show all there is."""
V = TypeVar("V", bound=Value)


class Ends(Exception):
    """Raised by a rule: this operator ends the region, for this reason."""


@dataclass
class Builder:
    """The graph under construction. Methods mirror the operations of :mod:`pathsgd.graph.nodes`."""

    nodes: list[Node] = field(default_factory=list)
    ends: dict[int, str] = field(default_factory=dict)
    boundaries: list[tuple[int, str, str]] = field(default_factory=list)
    multiplied: dict[int, tuple[int, ...]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    """The ends at which no rescaling passes."""
    outside: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    """The parameters that some operator reads."""
    narrow: set[str] = field(default_factory=set)
    """Those of 16 bits, which would be rounded by a rescaling that is no power of two."""
    unused: set[str] = field(default_factory=set)
    """Those that some operator multiplies by zeros, as by the state before the first step."""
    notes: list[str] = field(default_factory=list)
    where: str = ""

    def emit(self, operation: Operation, inputs: Iterable[Paths], shape: Iterable[int]) -> Paths:
        sources = tuple(value.node for value in inputs)
        self.nodes.append(Node(operation, sources, tuple(shape), self.where))
        return Paths(len(self.nodes) - 1)

    def shape(self, value: Value) -> Shape:
        return self.nodes[value.node].shape if isinstance(value, Paths) else value.shape

    # Where paths begin and end

    def begin(self, shape: Iterable[int], reason: str) -> Paths:
        """Units where paths begin."""
        return self.emit(nodes.Begin(reason), (), shape)

    def end(self, value: Value, reason: str, *, passes: bool = False) -> None:
        """``value`` is read by something that is no path: its units count as outputs of the region. Unless
        rescalings pass, it cannot be rescaled."""
        if isinstance(value, Paths):
            self.ends.setdefault(value.node, reason)
            self.boundaries.append((value.node, self.where, reason))
            self.stopped |= set() if passes else {value.node}
        else:
            for name in parameters_of(value):
                self.outside.setdefault(name, reason)

    def multiply_activations(
        self,
        values: Sequence[Value],
        reason: str,
        shape: Iterable[int],
        axes: Sequence[str] = (),
        target: str = "",
    ) -> Paths:
        """A product that is no path, as of two activations: the factors of its units are products of theirs.

        Args:
            values: what is multiplied; those that carry no paths do not change with a rescaling.
            reason: for the report.
            shape: of the result.
            axes: a letter for each axis of each value, as for einsum; by default they are multiplied entry by
                entry.
            target: the letters of the result.
        """
        shape, values = tuple(shape), [self.paths(v) if isinstance(v, Weight) else v for v in values]
        if not axes:
            target = "".join(map(chr, range(ord("a"), ord("a") + len(shape))))
            axes = [target[len(shape) - len(self.shape(value)) :] for value in values]
        for value in values:
            self.end(value, reason, passes=True)
        own = [letters for value, letters in zip(values, axes, strict=True) if isinstance(value, Paths)]
        products = f"{','.join(own)}->{target}" if own else ""
        product = self.emit(nodes.Begin(reason, products), (), shape)
        self.multiplied[product.node] = tuple(value.node for value in values if isinstance(value, Paths))
        return product

    def paths(self, value: Value, shape: Shape | None = None) -> Paths:
        """``value`` as units of the graph, broadcast to ``shape``: a weight becomes edges from the
        constant unit; anything else begins paths of its own."""
        target = self.shape(value) if shape is None else shape
        if isinstance(value, Weight):
            return self.emit(nodes.Source(value), (), target)
        if isinstance(value, Unknown):
            for name in value.parameters:
                self.outside.setdefault(name, value.reason)
            value = self.begin(value.shape, value.reason)
        return self.expand(value, target)

    def multiply_zeros(self, weight: Value, shape: Shape) -> Weight:
        """Zeros of a shape, as zeros times a weight are: no path, whatever the weight."""
        self.unused |= parameters_of(weight)
        return replace(number(0), shape=shape)

    def end_at_statistics(self, outputs: Iterable[int]) -> None:
        """Ends paths at squares from which no weight and no output is reached: the mean square in a norm that
        is written out, as if the norm were one operator."""
        leads_on, statistics = set(outputs), []
        for k, node in reversed(list(enumerate(self.nodes))):
            operation = node.operation
            has_parameter = isinstance(operation, nodes.Weighted) and operation.weight.parameter is not None
            if isinstance(operation, nodes.Square) and k not in leads_on:
                statistics.append(k)
            elif k in leads_on or has_parameter:
                leads_on.update(node.inputs)
        reason = "a square that is only used to normalise"
        for k in reversed(statistics):
            node = self.nodes[k]
            self.where = node.where
            self.end(Paths(node.inputs[0]), reason)
            self.nodes[k] = replace(node, operation=nodes.Begin(reason), inputs=())

    # Edges with weights

    def linear(self, x: Paths, weight: Weight) -> Paths:
        return self.emit(nodes.Linear(weight), (x,), (*self.shape(x)[:-1], weight.shape[0]))

    def conv(self, x: Paths, conv: Conv, shape: Iterable[int]) -> Paths:
        return self.emit(conv, (x,), shape)

    def multiply(self, x: Paths, weight: Weight) -> Paths:
        shape = broadcast(self.shape(x), weight.shape)
        return self.emit(nodes.Multiply(weight), (self.expand(x, shape),), shape)

    def times(self, x: Paths, value: float) -> Paths:
        return x if value == 1 else self.multiply(x, number(value))

    def add(self, values: Sequence[Value]) -> Paths:
        shape = broadcast(*(self.shape(value) for value in values))
        parts = [self.paths(value, shape) for value in values if not is_zero(value)]
        if not parts:  # zeros all of them
            parts = [self.paths(values[0], shape)]
        if len(parts) == 1:
            return parts[0]
        return self.emit(nodes.Add(), parts, shape)

    def square(self, x: Paths) -> Paths:
        return self.emit(nodes.Square(), (x,), self.shape(x))

    # Data movement: of activations as nodes, of weights as views of what they are stored in

    def view(self, value: V, view: View) -> V:
        shape = view_shape(view, self.shape(value))
        moved: Any
        if isinstance(value, Paths):
            moved = self.emit(view, (value,), shape)
        elif isinstance(value, Weight):
            moved = _view_weight(value, view, shape)
        elif isinstance(value, Choice):
            assert value.weight is not None
            moved = Unknown(shape, value.floating, value.reason, value.parameters)
            if isinstance(view, nodes.Permute) and view.dims[0] == 0:
                moved = replace(value, shape=shape, weight=self.view(value.weight, view))
        else:
            moved = replace(value, shape=shape)
        return moved

    def reshape(self, value: V, shape: Iterable[int]) -> V:
        target = tuple(shape)
        if -1 in target:
            rest = max(math.prod(n for n in target if n != -1), 1)
            target = tuple(n if n != -1 else math.prod(self.shape(value)) // rest for n in target)
        return value if target == self.shape(value) else self.view(value, nodes.Reshape(target))

    def permute(self, value: V, dims: Sequence[int]) -> V:
        order = tuple(d % len(dims) for d in dims)
        return value if order == tuple(range(len(dims))) else self.view(value, nodes.Permute(order))

    def slice(self, value: V, dim: int, start: int, length: int, step: int = 1) -> V:
        if (start, length, step) == (0, self.shape(value)[dim], 1):
            return value
        return self.view(value, nodes.Slice(dim, start, length, step))

    def expand(self, value: V, shape: Shape) -> V:
        old = self.shape(value)
        value = self.reshape(value, (1,) * (len(shape) - len(old)) + old)
        return value if self.shape(value) == shape else self.view(value, nodes.Expand(shape))

    def cat(self, values: Sequence[Paths], dim: int) -> Paths:
        shape = list(self.shape(values[0]))
        shape[dim] = sum(self.shape(value)[dim] for value in values)
        return self.emit(nodes.Cat(dim), values, shape)

    def reduce(self, x: Paths, dims: Sequence[int]) -> Paths:
        """Sum over ``dims``, kept with size one."""
        shape = [1 if d in dims else n for d, n in enumerate(self.shape(x))]
        return self.emit(nodes.Reduce(tuple(dims)), (x,), shape)

    def axis_map(self, x: Paths, dim: int, window: Window) -> Paths:
        shape = list(self.shape(x))
        shape[dim] = window.out
        return self.emit(nodes.AxisMap(dim, window), (x,), shape)


def parameters_of(value: Value) -> frozenset[str]:
    """The names of the parameters a value without paths was made of."""
    if isinstance(value, Unknown):
        return value.parameters
    if isinstance(value, Weight) and value.parameter is not None:
        return frozenset([value.parameter.name])
    return frozenset()


def is_zero(value: Value) -> bool:
    """A literal zero: it carries no path, so adding it adds nothing."""
    return (
        isinstance(value, Weight)
        and value.parameter is None
        and any(f.literal and not any(f.literal) for f in value.factors)
    )


def is_fixed(value: Value) -> bool:
    return isinstance(value, Weight) and value.parameter is None


def broadcast(*shapes: Shape) -> Shape:
    return tuple(torch.broadcast_shapes(*shapes))


def _view_weight(weight: Weight, view: View, shape: Shape) -> Weight:
    def view_stored(stored: Stored) -> Stored:
        if stored.shape == () and math.prod(weight.shape) != 1:
            return stored
        if stored.shape != weight.shape:
            raise Ends("a weight is computed from tensors of different shapes")
        return replace(stored, shape=shape, views=(*stored.views, view))

    parameter = weight.parameter and view_stored(weight.parameter)
    return replace(weight, shape=shape, parameter=parameter, factors=tuple(map(view_stored, weight.factors)))
