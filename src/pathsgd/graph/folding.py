"""Places whose path sums are equal, computed once.

All tokens of a sequence begin with the same paths, and linear layers, norms and attention (an average over
the keys, see :func:`pathsgd.graph.rules.matrix_products.attend`) keep them the same. So a value that does not
change along an axis is given size one there, and expanded only before an operation that tells its places
apart: a padded convolution, a learned position, an output. The folded graph computes the same function of the
weights in the same language of nodes, so the backward pass needs no rule of its own: the adjoint of an
expansion is a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pathsgd.graph import nodes
from pathsgd.graph.nodes import Conv, Node, Operation, Shape
from pathsgd.graph.structure import Structure
from pathsgd.graph.views import reshaped_axes


@dataclass(frozen=True)
class Folded:
    """A graph with equal places written once."""

    graph: Structure
    place: tuple[int, ...]
    """The number that each node of the traced graph has here."""
    whole: tuple[int, ...]
    """Likewise, the number of its value at full size, if it is an output or an end; else as ``place``."""


def fold(graph: Structure) -> Folded:
    """``graph`` with equal places written once."""
    return _Folding(graph).run()


class _Folding:
    """The walk that finds the folded shapes.

    ``shapes[k]`` is the shape of node k with size one along the axes on which its value does not change;
    ``wanted[k]`` are the shapes in which node k reads its inputs.
    """

    def __init__(self, graph: Structure) -> None:
        self.graph = graph
        self.shapes: list[Shape] = []
        self.wanted: list[list[Shape]] = []

    def run(self) -> Folded:
        for node in self.graph.nodes:
            shape, wanted = self.visit(node, [self.shapes[source] for source in node.inputs])
            self.shapes.append(shape)
            self.wanted.append(wanted)
        cheap = nodes.Begin, nodes.Source, nodes.Expand
        self.shapes = _use_shape_of_readers(self.graph, self.shapes, self.wanted, cheap)
        return _rewrite(self.graph, self.shapes, self.wanted)

    def visit(self, node: Node, inputs: list[Shape]) -> tuple[Shape, list[Shape]]:
        """The folded shape of a node, and the shapes in which it reads its inputs."""
        full, ndim = node.shape, len(node.shape)
        before = [self.graph.nodes[source].shape for source in node.inputs]
        match node.operation:
            case nodes.Begin():
                return tuple(min(n, 1) for n in full), []
            case nodes.Source(weight):
                return _pad_shape(weight.shape, ndim), []
            case nodes.Multiply(weight):
                shape = _broadcast([inputs[0], _pad_shape(weight.shape, ndim)])
                return shape, [shape]
            case nodes.Linear():
                return (*inputs[0][:-1], full[-1]), [(*inputs[0][:-1], before[0][-1])]
            case Conv():
                return _convolve(node.operation, inputs[0], before[0], full)
            case nodes.Add():
                shape = _broadcast(inputs)
                return shape, [shape] * len(inputs)
            case nodes.Square() | nodes.Expand():
                return inputs[0], inputs
            case nodes.AxisMap(dim):
                return _put(inputs[0], dim, full[dim]), [_put(inputs[0], dim, before[0][dim])]
            case nodes.Reduce(dims):
                wanted = tuple(before[0][d] if d in dims else n for d, n in enumerate(inputs[0]))
                return tuple(1 if d in dims else n for d, n in enumerate(inputs[0])), [wanted]
            case nodes.Cat(dim):
                shape = _broadcast([_put(shape, dim, 1) for shape in inputs])
                return _put(shape, dim, full[dim]), [_put(shape, dim, n[dim]) for n in before]
            case nodes.Reshape():
                return _reshape(inputs[0], before[0], full)
            case nodes.Permute(dims):
                return tuple(inputs[0][d] for d in dims), inputs
            case nodes.Slice(dim):
                return _put(inputs[0], dim, min(inputs[0][dim], full[dim])), inputs
            case nodes.Embed():
                raise AssertionError("an adjoint in a traced graph")


def _use_shape_of_readers(
    graph: Structure, shapes: list[Shape], wanted: list[list[Shape]], cheap: tuple[type[Operation], ...]
) -> list[Shape]:
    """The shapes, but that of what is cheap in any, such as the bias of a convolution, is the one that all
    its readers want."""
    read: list[list[Shape]] = [[] for _ in shapes]
    for node, own in zip(graph.nodes, wanted, strict=True):
        for source, shape in zip(node.inputs, own, strict=True):
            read[source].append(shape)
    return [
        own[0] if isinstance(node.operation, cheap) and len(set(own)) == 1 else shape
        for node, shape, own in zip(graph.nodes, shapes, read, strict=True)
    ]


def _rewrite(graph: Structure, shapes: Sequence[Shape], wanted: Sequence[Sequence[Shape]]) -> Folded:
    """The graph with nodes of these shapes, expanded where a reader wants another."""
    written: list[Node] = []
    regions: list[int] = []
    expanded: dict[tuple[int, Shape], int] = {}
    place: list[int] = []

    def emit(node: Node, region: int) -> int:
        written.append(node)
        regions.append(region)
        return len(written) - 1

    def read(source: int, shape: Shape) -> int:
        """The number of a value of the graph in this shape."""
        if shape == shapes[source]:
            return place[source]
        if (source, shape) not in expanded:
            node = Node(nodes.Expand(shape), (place[source],), shape, graph.nodes[source].where)
            expanded[source, shape] = emit(node, graph.regions[source])
        return expanded[source, shape]

    whole: list[int] = []
    returned = {*graph.ends, *graph.outputs}
    for k, node in enumerate(graph.nodes):
        inputs = tuple(read(*pair) for pair in zip(node.inputs, wanted[k], strict=True))
        operation = _fold_operation(node.operation, wanted[k], shapes[k])
        place.append(emit(Node(operation, inputs, shapes[k], node.where), graph.regions[k]))
        whole.append(read(k, node.shape) if k in returned else place[k])
    rewritten = replace(
        graph,
        nodes=tuple(written),
        regions=tuple(regions),
        ends={whole[k]: reason for k, reason in graph.ends.items()},
        outputs=tuple(whole[k] for k in graph.outputs),
        boundaries=tuple((whole[k], where, reason) for k, where, reason in graph.boundaries),
        multiplied={},  # which are of no use for gamma
    )
    return Folded(rewritten, tuple(place), tuple(whole))


def _fold_operation(operation: Operation, inputs: Sequence[Shape], shape: Shape) -> Operation:
    match operation:
        case nodes.Expand():
            return nodes.Expand(shape)
        case nodes.Reshape():
            return nodes.Reshape(shape)
        case nodes.Slice(dim) if inputs[0][dim] == 1:
            return nodes.Slice(dim, 0, shape[dim])
        case nodes.AxisMap(dim, window) if (inputs[0][dim], shape[dim]) != (window.size, window.out):
            return replace(operation, window=replace(window, size=inputs[0][dim], out=shape[dim]))
        case _:
            return operation


def _convolve(conv: Conv, x: Shape, before: Shape, full: Shape) -> tuple[Shape, list[Shape]]:
    """A window over equal places sums the same everywhere, unless some see padding: one window is enough."""
    shape, wanted = [x[0], full[1]], [x[0], before[1]]
    for k, d in enumerate(range(2, len(x))):
        folded = x[d] == 1 and not conv.padding[k] and not conv.transposed
        reach = conv.dilation[k] * (conv.weight.shape[d] - 1) + 1
        shape.append(1 if folded else full[d])
        wanted.append(reach if folded else before[d])
    return tuple(shape), [tuple(wanted)]


def _reshape(x: Shape, before: Shape, full: Shape) -> tuple[Shape, list[Shape]]:
    """Axes that are split or merged are folded or expanded together."""
    shape, wanted = list(full), list(before)
    for old, new in reshaped_axes(before, full) if 0 not in before else ():
        if all(x[d] == 1 for d in old):
            for d in old:
                wanted[d] = 1
            for d in new:
                shape[d] = 1
    return tuple(shape), [tuple(wanted)]


def _pad_shape(shape: Shape, ndim: int) -> Shape:
    """The shape of a weight that is broadcast to ``ndim`` axes."""
    return (1,) * (ndim - len(shape)) + shape


T = TypeVar("T")


def _put(own: Sequence[T], axis: int, new: T) -> tuple[T, ...]:
    """Returns ``own`` with another entry for one axis."""
    return (*own[:axis], new, *own[axis + 1 :])


def _broadcast(shapes: list[Shape]) -> Shape:
    """Size one where all are of size one."""
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*shapes, strict=True))
