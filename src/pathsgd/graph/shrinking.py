"""Large images made smaller: away from the border all places of an axis have the same path sums.

Every place of an image begins with the same paths, and a convolution tells apart those whose window sees the
border: one more on each side, or a few. Of the equal places between, one is enough. All values of a stage
(linked without a stride) lose the same number of places, so the stage is a network on a smaller image. A
gather puts them back before an operation with a stride, or one that needs all places; its adjoint is a sum.
Of the 56 rows in the first stage of a ResNet-50 ten are left, and twelve of the 28 in the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from pathsgd.graph import nodes
from pathsgd.graph.folding import Folded, Step, pad_shape, put, rewrite, use_shape_of_readers
from pathsgd.graph.nodes import Conv, Node, Shape, Window
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.union_find import UnionFind
from pathsgd.graph.views import reshaped_axes

LEAST_CUT = 8
"""An axis is made smaller only if at least one place of so many can be left out."""
LARGEST_SHARE = 0.75
"""The smaller graph is used only if it has at most this share of the entries, what is put back included."""


class Inside(NamedTuple):
    """All places of an axis are equal but the first ``left`` and the last ``right``."""

    left: int
    right: int


class Link(NamedTuple):
    """The axis of the output that an axis of an input leads to: if n places are left out there, stride * n
    are here."""

    axis: int
    """Of the output."""
    stride: int = 1


Insides = tuple[Inside | None, ...]
"""By axis; None if its places differ."""
Links = tuple[Link | None, ...]
"""By axis of an input; None if all places are needed."""


def shrink(folded: Folded) -> Folded:
    """The same with smaller images, if that is worth it."""
    found = _Shrinking(folded.graph).run()
    if _count_entries(found.graph) > LARGEST_SHARE * _count_entries(folded.graph):
        return folded
    return found.after(folded)


def _count_entries(graph: PathGraph) -> int:
    views = nodes.Reshape, nodes.Permute, nodes.Slice, nodes.Expand
    return sum(math.prod(node.shape) for node in graph.nodes if not isinstance(node.operation, views))


class _Shrinking:
    """``inside[k]`` says where places of node k are equal, ``links[k]`` how it reads its inputs.

    Axes that are linked without a stride lose the same places: they are one set of ``sets``, in which
    ``axes[k]`` are those of node k.
    """

    def __init__(self, graph: PathGraph) -> None:
        self.graph = graph
        self.inside: list[Insides] = []
        self.links: list[list[Links]] = []
        self.sets = UnionFind()
        self.axes: list[range] = []
        for node in graph.nodes:
            before = [graph.nodes[source].shape for source in node.inputs]
            found, links = _visit(node, [self.inside[source] for source in node.inputs], before)
            inside = tuple(
                own if _count_droppable(own, n) else None for own, n in zip(found, node.shape, strict=True)
            )
            self.inside.append(inside)
            slides = isinstance(node.operation, (Conv, nodes.AxisMap))
            self.links.append([_keep_links(own, inside) for own in links] if slides else links)
            self.axes.append(self.sets.grow(len(node.shape)))
            self._unite(node)

    def _unite(self, node: Node) -> None:
        """The axes of the last node with those it is linked to."""
        for source, links in zip(node.inputs, self.links[-1], strict=True):
            for axis, link in zip(self.axes[source], links, strict=True):
                if link is not None and link.stride == 1:
                    self.sets.union(axis, self.axes[-1][link.axis])

    def run(self) -> Folded:
        by_set = self._choose_cuts()
        cuts = [[by_set[self.sets.find(axis)] for axis in own] for own in self.axes]
        shapes = [
            tuple(n - cut for n, cut in zip(node.shape, own, strict=True))
            for node, own in zip(self.graph.nodes, cuts, strict=True)
        ]
        wanted = [
            [self._cut(source, links, own) for source, links in zip(node.inputs, self.links[k], strict=True)]
            for k, (node, own) in enumerate(zip(self.graph.nodes, cuts, strict=True))
        ]
        shapes = use_shape_of_readers(self.graph, shapes, wanted, (nodes.Begin, nodes.Source))
        found = rewrite(self.graph, shapes, wanted, self._resize)
        counts = {
            found.place[k]: self._count_places(k, shape)
            for k, shape in enumerate(shapes)
            if shape != self.graph.nodes[k].shape
        }
        return replace(found, counts=counts)

    def _choose_cuts(self) -> dict[int, int]:
        """How many places the axes of each set lose: as many as leave one inside everywhere."""
        most: dict[int, int] = {}
        largest: dict[int, int] = {}
        for k, node in enumerate(self.graph.nodes):
            for axis, inside, n in zip(self.axes[k], self.inside[k], node.shape, strict=True):
                own = self.sets.find(axis)
                most[own] = min(most.get(own, n), _count_droppable(inside, n))
                largest[own] = max(largest.get(own, n), n)
        return {own: cut if cut * LEAST_CUT >= largest[own] else 0 for own, cut in most.items()}

    def _cut(self, source: int, links: Links, cuts: Sequence[int]) -> Shape:
        """The shape in which an input is read, from what the output loses."""
        return tuple(
            n if link is None else n - link.stride * cuts[link.axis]
            for n, link in zip(self.graph.nodes[source].shape, links, strict=True)
        )

    def _resize(self, source: int, have: Shape, want: Shape) -> Iterator[Step]:
        """Gathers that change the number of equal places of a value."""
        shape = have
        for axis, (m, n) in enumerate(zip(have, want, strict=True)):
            if m not in (n, 1):
                inside = self.inside[source][axis]
                assert inside is not None
                shape = put(shape, axis, n)
                yield nodes.AxisMap(axis, Window("gather", m, n, index=_find_places(inside, m, n))), shape
        if shape != want:
            yield nodes.Expand(want), want

    def _count_places(self, k: int, shape: Shape) -> dict[int, Shape]:
        """How many places each one of node k stands for, by axis."""
        counts = {}
        for axis, (n, m) in enumerate(zip(self.graph.nodes[k].shape, shape, strict=True)):
            inside = self.inside[k][axis]
            if m not in (n, 1):
                assert inside is not None
                counts[axis] = (1,) * inside.left + (n - m + 1,) + (1,) * (m - inside.left - 1)
        return counts


def _count_droppable(inside: Inside | None, n: int) -> int:
    """How many places can be left out."""
    return 0 if inside is None else max(0, n - inside.left - inside.right - 1)


def _keep_links(links: Links, inside: Insides) -> Links:
    """Without links to axes of the output of which no places are equal: all places of the input are needed
    there."""
    return tuple(link if link is not None and inside[link.axis] is not None else None for link in links)


def _find_places(inside: Inside, have: int, want: int) -> Shape:
    """For every place that is wanted, the one there is that has its value."""
    middle = want - inside.left - inside.right
    return (
        *range(inside.left),
        *(inside.left,) * middle,
        *range(have - inside.right, have),
    )


def _visit(
    node: Node, inputs: list[Insides], before: list[Shape]
) -> tuple[Sequence[Inside | None], list[Links]]:
    """Where places of a node are equal, and how it reads its inputs."""
    shape, ndim = node.shape, len(node.shape)
    every = tuple(map(Link, range(ndim)))
    match node.operation:
        case nodes.Begin():
            return [Inside(0, 0)] * ndim, []
        case nodes.Source(weight):
            return [Inside(0, 0) if n == 1 else None for n in pad_shape(weight.shape, ndim)], []
        case nodes.Multiply(weight):
            alike = [d for d, n in enumerate(pad_shape(weight.shape, ndim)) if n == 1]
            return _keep(inputs[0], alike), [_keep(every, alike)]
        case nodes.Linear():
            return _keep(inputs[0], range(ndim - 1)), [(*every[:-1], None)]
        case Conv():
            return _slide_conv(node.operation, inputs[0], before[0], shape)
        case nodes.AxisMap(dim, window):
            slides = window.kind in ("sum", "mean")
            reach = window.dilation * (window.kernel - 1) + 1
            own = _slide(inputs[0][dim], window.size, window.out, reach, window.stride, window.padding)
            return (
                put(inputs[0], dim, own if slides else None),
                [put(every, dim, Link(dim, window.stride))],
            )
        case nodes.Add():
            return _join(inputs), [every] * len(inputs)
        case nodes.Square():
            return inputs[0], [every]
        case nodes.Expand():
            repeated = [n != m for n, m in zip(before[0], shape, strict=True)]
            inside = [Inside(0, 0) if new else own for new, own in zip(repeated, inputs[0], strict=True)]
            return inside, [tuple(None if new else link for new, link in zip(repeated, every, strict=True))]
        case nodes.Reduce(dims):
            kept = [d for d in range(ndim) if d not in dims]
            return _keep(inputs[0], kept), [_keep(every, kept)]
        case nodes.Cat(dim) | nodes.Slice(dim):
            return put(_join(inputs), dim, None), [put(every, dim, None)] * len(inputs)
        case nodes.Permute(dims):
            inverse = sorted(range(ndim), key=dims.__getitem__)
            return [inputs[0][d] for d in dims], [tuple(map(Link, inverse))]
        case nodes.Reshape():
            return _reshape(inputs[0], before[0], shape)
        case nodes.Embed():
            raise AssertionError("an adjoint in a traced graph")


T = TypeVar("T")


def _keep(own: Sequence[T | None], axes: Iterable[int]) -> tuple[T | None, ...]:
    kept = set(axes)
    return tuple(each if d in kept else None for d, each in enumerate(own))


def _join(inputs: list[Insides]) -> list[Inside | None]:
    return [
        Inside(max(each.left for each in own), max(each.right for each in own)) if None not in own else None
        for own in zip(*inputs, strict=True)
    ]


def _slide_conv(
    conv: Conv, x: Insides, before: Shape, shape: Shape
) -> tuple[Sequence[Inside | None], list[Links]]:
    inside: list[Inside | None] = [x[0], None]
    links: list[Link | None] = [Link(0), None]
    for k, d in enumerate(range(2, len(shape))):
        reach = conv.dilation[k] * (conv.weight.shape[d] - 1) + 1
        own = _slide(x[d], before[d], shape[d], reach, conv.stride[k], conv.padding[k])
        inside.append(None if conv.transposed else own)
        links.append(Link(d, conv.stride[k]))
    return inside, [tuple(links)]


def _slide(inside: Inside | None, n: int, out: int, reach: int, stride: int, padding: int) -> Inside | None:
    """Where the outputs of a sliding window are equal: those whose window lies among equal inputs."""
    if inside is None:
        return None
    first = -(-(inside.left + padding) // stride)
    last = (n - inside.right - reach + padding) // stride
    return Inside(first, max(0, out - 1 - last))


def _reshape(x: Insides, before: Shape, shape: Shape) -> tuple[Sequence[Inside | None], list[Links]]:
    """Axes that are neither split nor merged stay what they are."""
    inside: list[Inside | None] = [None] * len(shape)
    links: list[Link | None] = [None] * len(before)
    for old, new in reshaped_axes(before, shape) if 0 not in before else ():
        if len(old) == len(new) == 1:
            inside[new[0]], links[old[0]] = x[old[0]], Link(new[0])
    return inside, [tuple(links)]
