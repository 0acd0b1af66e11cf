"""Which entries of a parameter are alone on their paths.

Two passes over the graph count the weights on the longest path through every unit. The weights that one layer
leads into a unit are judged together, its bias with them: a bias of the last layer is alone on its own paths,
but it belongs to a layer on longer ones.

Where it is not exact it counts too many: all places of an axis that a convolution or a pooling runs over are
taken together. So what is called alone is alone, and no rescaling changes it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pathsgd.graph import nodes
from pathsgd.graph.nodes import Node, Shape, Weighted
from pathsgd.graph.views import compress, reshape_compressed, undo_view, view_shape, view_tensor

MANY = 2
"""Longer paths count as this long."""


def find_alone(
    graph_nodes: Sequence[Node], ends: Mapping[int, str], shapes: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """Whether no other weight lies on the paths of an entry, by parameters that lie on paths. Tensors have
    size one along axes on which they do not change. ``shapes`` are those of the parameters."""
    into, onward = _longest(graph_nodes)
    sums = _biased_sums(graph_nodes, ends)
    others: dict[str, Tensor] = {}
    for k, node in enumerate(graph_nodes):
        operation = node.operation
        if not isinstance(operation, Weighted) or operation.weight.parameter is None:
            continue
        unit, name = sums.get(k, k), operation.weight.parameter.name
        entries = _to_parameter(operation, into[unit] + onward[unit] - 1, shapes[name])
        others[name] = torch.maximum(others[name], entries) if name in others else entries
    return {name: count == 0 for name, count in others.items()}


def _biased_sums(graph_nodes: Sequence[Node], ends: Mapping[int, str]) -> dict[int, int]:
    """Maps the node of a bias to the sum that it goes into, if nothing else reads the bias."""
    readers: dict[int, list[int]] = {}
    for k, node in enumerate(graph_nodes):
        for source in node.inputs:
            readers.setdefault(source, []).append(k)
    return {
        k: reader
        for k, (reader, *others) in readers.items()
        if isinstance(graph_nodes[k].operation, nodes.Source) and k not in ends and not others
        if isinstance(graph_nodes[reader].operation, nodes.Add)
    }


def _longest(graph_nodes: Sequence[Node]) -> tuple[list[Tensor], list[Tensor]]:
    """The largest number of weights on a path that arrives at each unit of each node, and on one that leaves
    it."""
    counts = [
        isinstance(node.operation, Weighted) and node.operation.weight.parameter is not None
        for node in graph_nodes
    ]
    into: list[Tensor] = []
    for k, node in enumerate(graph_nodes):
        sources = [(into[source], graph_nodes[source].shape) for source in node.inputs]
        into.append((_arrive(node, sources) + counts[k]).clamp(max=MANY))
    onward = [_zeros(len(node.shape)) for node in graph_nodes]
    for k, node in reversed(list(enumerate(graph_nodes))):
        flows = _leave(node, onward[k], [graph_nodes[source].shape for source in node.inputs])
        for source, flow in zip(node.inputs, flows, strict=True):
            longest = flow + counts[k]
            if isinstance(node.operation, nodes.Square):
                longest = longest + into[source]  # the other path that meets this one in the product
            onward[source] = torch.maximum(onward[source], longest).clamp(max=MANY)
    return into, onward


def _arrive(node: Node, sources: list[tuple[Tensor, Shape]]) -> Tensor:
    operation, ndim = node.operation, len(node.shape)
    x = sources[0][0] if sources else _zeros(ndim)
    match operation:
        case nodes.Begin() | nodes.Source() | nodes.Multiply() | nodes.Expand():
            return x
        case nodes.Linear():
            return _largest(x, [ndim - 1])
        case nodes.Conv():
            return _largest(x, range(1, ndim))
        case nodes.Add():
            return functools.reduce(torch.maximum, [value for value, _ in sources])
        case nodes.Square():
            return 2 * x
        case nodes.AxisMap(dim):
            return _largest(x, [dim])
        case nodes.Reduce(dims):
            return _largest(x, dims)
        case nodes.Cat(dim):
            common = [max(value.shape[d] for value, _ in sources) for d in range(ndim)]
            parts = [
                value.expand([*common[:dim], shape[dim], *common[dim + 1 :]]) for value, shape in sources
            ]
            return compress(torch.cat(parts, dim))
        case nodes.Reshape(shape):
            return reshape_compressed(x, sources[0][1], shape)
        case nodes.Slice(dim):
            return x if x.shape[dim] == 1 else compress(view_tensor(operation, x))
        case nodes.Permute():
            return view_tensor(operation, x)
        case nodes.Embed():
            raise AssertionError("an adjoint in a traced graph")


def _leave(node: Node, y: Tensor, before: list[Shape]) -> list[Tensor]:
    operation, ndim = node.operation, len(node.shape)
    match operation:
        case nodes.Begin() | nodes.Source():
            return []
        case nodes.Linear():
            return [_largest(y, [ndim - 1])]
        case nodes.Conv():
            return [_largest(y, range(1, ndim))]
        case nodes.Add():
            return [y] * len(before)
        case nodes.Multiply() | nodes.Square() | nodes.Reduce():
            return [y]
        case nodes.AxisMap(dim):
            return [_largest(y, [dim])]
        case nodes.Cat(dim):
            if y.shape[dim] == 1:
                return [y] * len(before)
            return [compress(part) for part in y.split([shape[dim] for shape in before], dim)]
        case _:
            return [undo_view(operation, y, before[0], node.shape, _largest, 0)]


def _to_parameter(operation: Weighted, of_units: Tensor, shape: Shape) -> Tensor:
    """Returns what is known of units, for the entries of the parameter that leads into them."""
    weight = operation.weight
    match operation:
        case nodes.Linear():
            of_edges = _largest(of_units, range(of_units.dim() - 1)).reshape(-1, 1)
        case nodes.Conv():
            channels = _largest(of_units, [d for d in range(of_units.dim()) if d != 1]).flatten()
            if operation.transposed and len(channels) > 1:
                channels = channels.reshape(operation.groups, -1).amax(0)
            taps = (1,) * (len(weight.shape) - 2)
            of_edges = channels.reshape((1, -1, *taps) if operation.transposed else (-1, 1, *taps))
        case nodes.Multiply() | nodes.Source():
            of_edges = _narrow_to(of_units, weight.shape)
    assert weight.parameter is not None
    entries = _narrow_to(of_edges, weight.parameter.shape)
    shapes = [shape]
    for view in weight.parameter.views:
        shapes.append(view_shape(view, shapes[-1]))
    for k, view in reversed(list(enumerate(weight.parameter.views))):
        entries = undo_view(view, entries, shapes[k], shapes[k + 1], _largest, 0)
    return entries


def _narrow_to(x: Tensor, shape: Shape) -> Tensor:
    """The adjoint of broadcasting ``shape`` to the shape of ``x``, with max for sum."""
    extra = x.dim() - len(shape)
    x = _largest(x, [d for d in range(x.dim()) if d < extra or shape[d - extra] == 1])
    return x.reshape(x.shape[extra:])


def _largest(x: Tensor, dims: Sequence[int]) -> Tensor:
    wide = [d for d in dims if x.shape[d] > 1]
    return x.amax(wide, keepdim=True) if wide else x


def _zeros(ndim: int) -> Tensor:
    return torch.zeros((1,) * ndim, dtype=torch.int8, device="cpu")
