"""Which entries of which parameters belong to one unit, so that they are rescaled together.

A *class* is a set of units that can only be rescaled by one common factor: a channel at all its places,
a hidden unit at all times, a residual stream with everything added to it. Class 0 is the class of the
units that cannot be rescaled at all: inputs, outputs, and whatever meets a non-homogeneous operator.

The classes found are sound (rescaling one never changes the function) though not always complete: a
symmetry that ties two units by anything but equality is not offered.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pathsgd.graph import nodes
from pathsgd.graph.nodes import Conv, Node, Shape, Weight, conv_channels
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.structure import ParameterStatus
from pathsgd.graph.unit_ties import FIXED as FIXED
from pathsgd.graph.unit_ties import UnitTies, compress
from pathsgd.graph.views import view_tensor


@dataclass(frozen=True)
class EdgeClasses:
    """The classes at both ends of a weight's entries, each broadcastable to the weight's shape.

    A rescaling by s multiplies an entry by ``s[head] / s[tail]^degree``.
    """

    head: Tensor
    tail: Tensor
    degree: int = 1


@dataclass(frozen=True)
class UnitClasses:
    """The classes of a graph: how many, who they are, and which weights they change."""

    count: int
    edges: dict[int, EdgeClasses]
    """The classes at both ends of the weights of a node, by node with weights."""
    parameters: dict[str, EdgeClasses]
    """The classes at both ends of the entries of a parameter, by parameter, in the parameter's own shape."""
    owners: dict[str, Tensor]
    """The classes of the units a module (or a parameter) owns, in their order."""
    squared: Tensor
    """Whether a class feeds its outgoing edges through a square."""
    uncovered: dict[int, Tensor]
    """The classes of units that share one weight, which no rescaling changes, by node."""
    read: dict[int, tuple[Tensor, int]]
    """The classes of a node's units and the power with which their factor enters, by node that a weight
    reads."""


_found: weakref.WeakKeyDictionary[PathGraph, UnitClasses] = weakref.WeakKeyDictionary()


def unit_classes_of(graph: PathGraph) -> UnitClasses:
    """The classes of ``graph``, found once."""
    if graph not in _found:
        _found[graph] = _Search(graph).run()
    return _found[graph]


@dataclass
class _Search:
    """The search for classes: one walk over the nodes.

    ``ids[k]`` holds the unit numbers of node k's value, of size one along every axis on which they
    do not change; ``degrees[k]`` is the power with which a unit's factor enters the value.
    """

    graph: PathGraph
    ties: UnitTies = field(default_factory=UnitTies)
    ids: list[Tensor] = field(default_factory=list)
    degrees: list[int] = field(default_factory=list)
    edges: dict[int, EdgeClasses] = field(default_factory=dict)
    uncovered: dict[int, Tensor] = field(default_factory=dict)

    # The walk

    def run(self) -> UnitClasses:
        for k, node in enumerate(self.graph.nodes):
            inputs = [self.ids[source] for source in node.inputs]
            degrees = [self.degrees[source] for source in node.inputs]
            self.degrees.append(max(degrees, default=1))
            if len(set(degrees)) > 1:
                # A sum of values of different homogeneity keeps none of their symmetries.
                for ids in inputs:
                    self.ties.fix(ids)
            ids = self.visit(k, node, inputs)
            self.ids.append(ids)
            if k in self.graph.ends:
                self.ties.fix(ids)
        self.fix_dead_ends()
        self.share_parameters()
        self.fix_unread()
        return self.collect()

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

    def fix_unread(self) -> None:
        """A unit that no weight reads, as one that is sliced off, has nothing to be divided by its factor."""
        roots = self.ties.find_roots()
        read = self._contain(roots, {source for k in self.edges for source in self.graph.nodes[k].inputs})
        self.ties.fix((~read[roots]).nonzero().flatten())

    def _contain(self, roots: Tensor, chosen: Iterable[int]) -> Tensor:
        """Whether the values of these nodes have units of the class of a root, by root."""
        contained = torch.zeros(len(roots), dtype=torch.bool)
        for k in chosen:
            contained[roots[self.ids[k]]] = True
        return contained

    def visit(self, k: int, node: Node, inputs: list[Tensor]) -> Tensor:
        ndim = len(node.shape)
        match node.operation:
            case nodes.Begin():
                return torch.full((1,) * ndim, FIXED)
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
                self.degrees[k] = 2 * self.degrees[k]
                return inputs[0]
            case nodes.AxisMap(dim, window):
                return self.axis_map(inputs[0], dim, window.kind, window.index)
            case nodes.Reduce(dims):
                return self.ties.tie_along(inputs[0], list(dims))
            case nodes.Cat(dim):
                return self.cat(node, inputs, dim)
            case nodes.Expand():
                return inputs[0]
            case nodes.Reshape(shape):
                whole = inputs[0].expand(self.graph.nodes[node.inputs[0]].shape)
                return compress(whole.reshape(shape))
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
            self.edges[k] = EdgeClasses(head, tail, self.degrees[k])
        self.degrees[k] = 1
        return out

    def outside(self, weight: Weight) -> bool:
        """Whether a parameter also serves somewhere that is no path, so that it must not change."""
        assert weight.parameter is not None
        return self.graph.parameters[weight.parameter.name].status is ParameterStatus.OUTSIDE

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
        if not covers_one:
            # One weight for several units: it stays as it is, and they keep their own factors.
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
        extra = self.ties.fresh((*ids.shape[:dim], 1, *ids.shape[dim + 1 :]))
        places = torch.tensor([i if i >= 0 else ids.shape[dim] for i in index])
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
        first: dict[str, tuple[Tensor, Tensor, int]] = {}
        for k, weight in self.graph.weights():
            if k not in self.edges or weight.parameter is None:
                continue
            shape = self.graph.parameters[weight.parameter.name].shape
            edge = self.edges[k]
            head = self.ties.to_parameter(weight.parameter, weight.shape, edge.head, shape)
            tail = self.ties.to_parameter(weight.parameter, weight.shape, edge.tail, shape)
            if weight.parameter.name not in first:
                first[weight.parameter.name] = head, tail, edge.degree
                continue
            other_head, other_tail, degree = first[weight.parameter.name]
            self.ties.tie(head, other_head)
            self.ties.tie(tail, other_tail)
            if degree != edge.degree:
                self.ties.fix(tail)
        self.shared = first

    def collect(self) -> UnitClasses:
        unique, number = torch.unique(self.ties.find_roots(), return_inverse=True)
        assert int(unique[0]) == FIXED

        def final(edge: EdgeClasses) -> EdgeClasses:
            return EdgeClasses(number[edge.head], number[edge.tail], edge.degree)

        edges = {k: final(edge) for k, edge in self.edges.items()}
        parameters = {
            name: final(EdgeClasses(head, tail, degree)) for name, (head, tail, degree) in self.shared.items()
        }
        uncovered = {k: number[ids] for k, ids in self.uncovered.items()}
        squared = torch.zeros(len(unique), dtype=torch.bool)
        for edge in edges.values():
            if edge.degree != 1:
                squared[edge.tail.flatten()] = True
        sources = {self.graph.nodes[k].inputs[0] for k in edges if self.graph.nodes[k].inputs}
        read = {k: (number[self.ids[k]], self.degrees[k]) for k in sorted(sources)}
        owners = self.owners(edges, number)
        return UnitClasses(len(unique), edges, parameters, owners, squared, uncovered, read)

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
    """One number per output and per input channel, laid out to broadcast against the weight."""
    g = conv.groups
    taps = (1,) * (len(conv.weight.shape) - 2)
    if conv.transposed:
        # weight: (inputs, outputs / groups, *taps)
        if g == 1:
            return out.reshape(1, -1, *taps), into.reshape(-1, 1, *taps)
        head = out.reshape(g, 1, -1).expand(g, into.numel() // g, -1)
        return head.reshape(into.numel(), -1, *taps), into.reshape(-1, 1, *taps)
    head = out.reshape(-1, 1, *taps)
    if g == 1:
        return head, into.reshape(1, -1, *taps)
    tail = into.reshape(g, 1, -1).expand(g, out.numel() // g, -1)
    return head, tail.reshape(out.numel(), -1, *taps)
