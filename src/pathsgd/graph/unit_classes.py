"""Which entries of which parameters belong to one unit, so that they are rescaled together.

A *class* is a set of units that can only be rescaled by one common factor: a channel at all its places,
a hidden unit at all times, a residual stream with everything added to it. Class 0 is the class of the
units that cannot be rescaled at all: inputs, outputs, and whatever meets a non-homogeneous operator.

The factor of a class may follow from others (:mod:`pathsgd.graph.unit_relations`): behind a product of two
activations it is the product of theirs, and that of a key is the inverse of its query's. The classes found
are sound: rescaling one never changes the function.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pathsgd.graph import nodes
from pathsgd.graph.nodes import Conv, Node, Shape, Weight, conv_channels
from pathsgd.graph.regions import ZEROS
from pathsgd.graph.structure import ParameterStatus, Structure
from pathsgd.graph.unit_relations import FIXED as FIXED
from pathsgd.graph.unit_relations import Relations, Terms
from pathsgd.graph.unit_ties import UnitTies
from pathsgd.graph.views import compress, reshape_compressed, view_tensor

MOST_PRODUCTS = 1 << 20
"""Beyond so many products of units, as of all places with all others, places are tied."""


@dataclass(frozen=True)
class EdgeClasses:
    """The classes at both ends of a weight's entries, each broadcastable to the weight's shape.

    A rescaling by s multiplies an entry by ``s[head] / s[tail]``.
    """

    head: Tensor
    tail: Tensor


@dataclass(frozen=True)
class UnitClasses:
    """The classes of a graph: how many, who they are, and which weights they change."""

    relations: Relations
    edges: dict[int, EdgeClasses]
    """The classes at both ends of the weights of a node, by node with weights."""
    parameters: dict[str, EdgeClasses]
    """The classes at both ends of the entries of a parameter, by parameter, in the parameter's own shape."""
    owners: dict[str, Tensor]
    """The classes of the units a module (or a parameter) owns, in their order."""
    uncovered: dict[int, Tensor]
    """The classes of units that share one weight, which no rescaling changes, by node."""
    shifts: dict[str, float]
    """What the network adds to a parameter before it is a weight, by parameter, as 1 to a gain. The sum is
    what a rescaling multiplies."""

    @property
    def count(self) -> int:
        return self.relations.count

    @property
    def free(self) -> Tensor:
        """The classes that can be rescaled by themselves."""
        return self.relations.is_free.nonzero().flatten()


_found: weakref.WeakKeyDictionary[Structure, UnitClasses] = weakref.WeakKeyDictionary()


def unit_classes_of(graph: Structure) -> UnitClasses:
    """The classes of ``graph``, found once."""
    if graph not in _found:
        _found[graph] = _Search(graph).run()
    return _found[graph]


@dataclass
class _Search:
    """The search for classes: one walk over the nodes.

    ``ids[k]`` holds the unit numbers of node k's value, of size one along every axis on which they
    do not change.
    """

    graph: Structure
    ties: UnitTies = field(default_factory=UnitTies)
    ids: list[Tensor] = field(default_factory=list)
    edges: dict[int, EdgeClasses] = field(default_factory=dict)
    uncovered: dict[int, Tensor] = field(default_factory=dict)

    # The walk

    def run(self) -> UnitClasses:
        self.find_shifts()
        # What a weight leads from is not known if it is only multiplied by zeros.
        is_unknown = any(info.reason.endswith(ZEROS) for info in self.graph.parameters.values())
        for k, node in enumerate(self.graph.nodes):
            inputs = [self.ids[source] for source in node.inputs]
            ids = self.visit(k, node, inputs)
            self.ids.append(ids)
            if is_unknown or (k in self.graph.ends and k not in self.graph.passed):
                self.ties.fix(ids)
        self.fix_dead_ends()
        self.share_parameters()
        return self.collect(*self.solve())

    def find_shifts(self) -> None:
        shifts: dict[str, set[float]] = {}
        for _, weight in self.graph.weights():
            if weight.parameter is not None:
                shifts.setdefault(weight.parameter.name, set()).add(weight.parameter.shift)
        self.shifts = {name: own.pop() for name, own in shifts.items() if len(own) == 1}

    def fix_dead_ends(self) -> None:
        """A unit no output depends on has paths to nowhere: it is not rescaled."""
        alive = set(self.graph.ends)
        for k, node in reversed(list(enumerate(self.graph.nodes))):
            if k in alive:
                alive.update(node.inputs)
        roots = self.ties.find_roots()
        reached = self._contain(roots, alive)
        for k in range(len(self.ids)):
            if k not in alive:
                self.ties.fix(self.ids[k][~reached[roots[self.ids[k]]]])

    def solve(self) -> tuple[Tensor, Relations]:
        """Numbers the classes. What would change no weight that leads out of it, as a unit that is sliced
        off, has nothing to be divided by its factor, and is not rescaled."""
        sources = {source for k in self.edges for source in self.graph.nodes[k].inputs}
        while True:
            written = torch.zeros(self.ties.count, dtype=torch.bool)
            written[torch.cat([self.edges[k].head.flatten() for k in self.edges] or [written[:0].long()])] = (
                True
            )
            roots, derived = self.ties.solve(written)
            unique, number = torch.unique(roots, return_inverse=True)
            assert int(unique[0]) == FIXED
            derived = Terms(number[derived.of], number[derived.by], derived.power)
            relations = Relations(len(unique), derived)
            is_read, is_written = (torch.zeros(len(unique), dtype=torch.bool) for _ in range(2))
            is_read[number[self._contain(roots, sources).nonzero().flatten()]] = True
            is_written[number[written]] = True
            terms = relations.terms
            divided = torch.where(terms.power > 0, is_read[terms.of], is_written[terms.of])
            unread = relations.is_free.clone()
            unread[terms.by[divided]] = False
            if not bool(unread.any()):
                return number, relations
            self.ties.fix(unique[unread])

    def _contain(self, roots: Tensor, chosen: Iterable[int]) -> Tensor:
        """Whether the values of these nodes have units of the class of a root, by root."""
        contained = torch.zeros(len(roots), dtype=torch.bool)
        for k in chosen:
            contained[roots[self.ids[k]]] = True
        return contained

    def visit(self, k: int, node: Node, inputs: list[Tensor]) -> Tensor:
        ndim = len(node.shape)
        match node.operation:
            case nodes.Begin(products=""):
                return torch.full((1,) * ndim, FIXED)
            case nodes.Begin(products=products):
                return self.product(products, self.graph.multiplied[k])
            case nodes.Source(weight):
                return self.source(k, weight, ndim)
            case nodes.Linear(weight):
                tail = self.ties.tie_along(inputs[0], list(range(ndim - 1)))
                head = self.ties.fresh((1,) * (ndim - 1) + (weight.shape[0],))
                return self.add_weight(k, weight, head, tail, head.reshape(-1, 1), tail.reshape(1, -1))
            case nodes.Conv(weight):
                return self.convolution(k, node.operation, inputs[0])
            case nodes.Multiply(weight):
                return self.multiply(k, weight, inputs[0])
            case nodes.Add():
                for other in inputs[1:]:
                    self.ties.tie(inputs[0], other)
                return torch.broadcast_tensors(*inputs)[0]
            case nodes.Square():
                out = self.ties.fresh(tuple(inputs[0].shape))
                self.ties.relate(out, inputs[0], inputs[0])
                return out
            case nodes.AxisMap(dim, window):
                return self.axis_map(inputs[0], dim, window.kind, window.index)
            case nodes.Reduce(dims):
                return self.ties.tie_along(inputs[0], list(dims))
            case nodes.Cat(dim):
                return self.cat(node, inputs, dim)
            case nodes.Expand():
                return inputs[0]
            case nodes.Reshape(shape):
                return reshape_compressed(inputs[0], self.graph.nodes[node.inputs[0]].shape, shape)
            case nodes.Slice(dim):
                ids = inputs[0]
                return ids if ids.shape[dim] == 1 else view_tensor(node.operation, ids)
            case nodes.Permute():
                return view_tensor(node.operation, inputs[0])
            case nodes.Embed():
                raise AssertionError("an adjoint in a traced graph")

    def add_weight(
        self, k: int, weight: Weight, out: Tensor, into: Tensor, head: Tensor, tail: Tensor
    ) -> Tensor:
        """Records a weight between units; fixed weights tie all their units down."""
        if weight.parameter is None or self.outside(weight):
            self.ties.fix(out)
            self.ties.fix(into)
        if weight.parameter is not None:
            self.edges[k] = EdgeClasses(head, tail)
        return out

    def product(self, products: str, sources: tuple[int, ...]) -> Tensor:
        """The units of sums of products: all that are added up have one factor. Letters name axes, as for
        einsum."""
        operands, target = products.split("->")
        letters = "".join(dict.fromkeys(target + operands.replace(",", "")))

        def lay_out(ids: Tensor, own: str) -> Tensor:
            order = sorted(range(len(own)), key=lambda d: letters.index(own[d]))
            shape = [ids.shape[own.index(letter)] if letter in own else 1 for letter in letters]
            return ids.permute(order).reshape(shape)

        laid_out = [
            lay_out(compress(self.ids[source]), own)
            for source, own in zip(sources, operands.split(","), strict=True)
        ]
        shape = torch.broadcast_shapes(*(ids.shape for ids in laid_out))
        while math.prod(shape) > MOST_PRODUCTS:
            longest = [shape.index(max(shape))]
            laid_out = [self.ties.tie_along(ids, longest) for ids in laid_out]
            shape = torch.broadcast_shapes(*(ids.shape for ids in laid_out))
        first, *others = laid_out
        out = self.ties.fresh((*shape[: len(target)], *(1,) * (len(letters) - len(target))))
        if others:
            self.ties.relate(out, first, *others)
        else:
            self.ties.tie(out, first)
        return out.reshape(out.shape[: len(target)])

    def outside(self, weight: Weight) -> bool:
        """Whether a parameter also serves somewhere that is no path, or is seen with two numbers added to it,
        as w and 1 - w are, so that it must not change."""
        assert weight.parameter is not None
        name = weight.parameter.name
        return self.graph.parameters[name].status is ParameterStatus.OUTSIDE or name not in self.shifts

    def source(self, k: int, weight: Weight, ndim: int) -> Tensor:
        layout = (1,) * (ndim - len(weight.shape)) + weight.shape
        if weight.parameter is None:
            return torch.full((1,) * ndim, FIXED)
        ids = self.ties.fresh(layout)
        if self.outside(weight):
            self.ties.fix(ids)
        flat = ids.reshape(weight.shape)
        self.edges[k] = EdgeClasses(flat, torch.full((1,) * flat.dim(), FIXED))
        return ids

    def convolution(self, k: int, conv: Conv, ids: Tensor) -> Tensor:
        ndim = ids.dim()
        into = self.ties.tie_along(ids, [d for d in range(ndim) if d != 1])
        inputs, outputs = conv_channels(conv)
        out = self.ties.fresh((1, outputs) + (1,) * (ndim - 2))
        head, tail = conv_ends(conv, out.reshape(-1), into.expand(1, inputs, *into.shape[2:]).reshape(-1))
        return self.add_weight(k, conv.weight, out, into, head, tail)

    def multiply(self, k: int, weight: Weight, ids: Tensor) -> Tensor:
        if any(factor.inverse_sigma is not None for factor in weight.factors):
            # Running statistics do not follow a rescaling of what they were taken of.
            self.ties.fix(ids)
        if weight.parameter is None:
            return ids
        layout = (1,) * (ids.dim() - len(weight.shape)) + weight.shape
        covers_one = all(n > 1 or ids.shape[d] == 1 for d, n in enumerate(layout))
        if not covers_one or self.outside(weight):
            # It stays as it is, as one for several units does, and units keep their own factors.
            unchanged = torch.full((1,) * len(weight.shape), FIXED)
            self.edges[k] = EdgeClasses(unchanged, unchanged)
            self.uncovered[k] = ids
            return ids
        out = self.ties.fresh(layout)
        tail = ids.reshape(ids.shape[ids.dim() - len(weight.shape) :])
        return self.add_weight(k, weight, out, ids, out.reshape(weight.shape), tail)

    def axis_map(self, ids: Tensor, dim: int, kind: str, index: Shape) -> Tensor:
        if ids.shape[dim] == 1:
            return ids
        if kind != "gather":
            return self.ties.tie_along(ids, [dim])
        # A place that is filled with zeros belongs to no other unit.
        zeros = iter(range(ids.shape[dim], ids.shape[dim] + index.count(-1)))
        extra = self.ties.fresh((*ids.shape[:dim], index.count(-1), *ids.shape[dim + 1 :]))
        places = torch.tensor([i if i >= 0 else next(zeros) for i in index])
        return torch.cat([ids, extra], dim).index_select(dim, places)

    def cat(self, node: Node, inputs: list[Tensor], dim: int) -> Tensor:
        common = [max(ids.shape[d] for ids in inputs) for d in range(len(node.shape))]
        widened = []
        for source, ids in zip(node.inputs, inputs, strict=True):
            common[dim] = self.graph.nodes[source].shape[dim]
            widened.append(ids.expand(common))
        return compress(torch.cat(widened, dim))

    # Afterwards

    def share_parameters(self) -> None:
        """A weight used in several places has one ratio of factors: its heads agree, and its tails."""
        first: dict[str, EdgeClasses] = {}
        for k, weight in self.graph.weights():
            if k not in self.edges or weight.parameter is None:
                continue
            shape = self.graph.parameters[weight.parameter.name].shape
            head, tail = (
                self.ties.to_parameter(weight.parameter, weight.shape, ids, shape)
                for ids in (self.edges[k].head, self.edges[k].tail)
            )
            if (other := first.get(weight.parameter.name)) is not None:
                head, tail = self.ties.merge(other.head, head), self.ties.merge(other.tail, tail)
            first[weight.parameter.name] = EdgeClasses(head, tail)
        self.shared = {
            name: EdgeClasses(self.ties.fill_in(edge.head), self.ties.fill_in(edge.tail))
            for name, edge in first.items()
        }

    def collect(self, number: Tensor, relations: Relations) -> UnitClasses:
        def final(edge: EdgeClasses) -> EdgeClasses:
            return EdgeClasses(number[edge.head], number[edge.tail])

        edges = {k: final(edge) for k, edge in self.edges.items()}
        parameters = {name: final(edge) for name, edge in self.shared.items()}
        uncovered = {k: number[ids] for k, ids in self.uncovered.items()}
        shifts = {name: shift for name, shift in self.shifts.items() if shift and name in parameters}
        return UnitClasses(relations, edges, parameters, self.owners(edges, number), uncovered, shifts)

    def owners(self, edges: dict[int, EdgeClasses], number: Tensor) -> dict[str, Tensor]:
        """The classes each parameter leads into, under its own name and under its module's."""
        found: dict[str, Tensor] = {}
        by_module: dict[str, dict[str, Tensor]] = {}
        for k, weight in self.graph.weights():
            if k not in edges or weight.parameter is None or weight.parameter.name in found:
                continue
            heads = number[self.ids[k]].flatten()
            if isinstance(self.graph.nodes[k].operation, (nodes.Multiply, nodes.Source)):
                heads = edges[k].head.expand(weight.shape).flatten()
            found[weight.parameter.name] = heads
            module = weight.parameter.name.rpartition(".")[0]
            by_module.setdefault(module, {})[weight.parameter.name] = heads
        for module, vectors in by_module.items():
            first, *rest = vectors.values()
            if all(torch.equal(first, other) for other in rest):
                found.setdefault(module, first)
        return found


def conv_ends(conv: Conv, out: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """One number per output and per input channel, laid out to broadcast against the weight; in groups,
    against the weight with an axis of groups before its others."""
    groups = (conv.groups,) if conv.groups > 1 else ()
    taps = (1,) * (len(conv.weight.shape) - 2)
    rows, columns = (into, out) if conv.transposed else (out, into)
    by_row, by_column = rows.reshape(*groups, -1, 1, *taps), columns.reshape(*groups, 1, -1, *taps)
    return (by_column, by_row) if conv.transposed else (by_row, by_column)
