"""The blocks of a model's parameters: what takes one relative step together.

A block is a parameter, or the rows of one that are read together: the queries, the keys and the values of a
packed projection are three. A family is the blocks that lead into the same units, as a layer's weight and
bias do: a block that has no size of its own, a bias of zero, takes that of its family.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from pathsgd.graph.nodes import Add, Conv, Expand, Linear, Permute, Reshape, Slice, Source
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.structure import ParameterInfo
from pathsgd.graph.unit_classes import FIXED, UnitClasses, unit_classes_of
from pathsgd.graph.unit_groups import Group, Part, find_unit_groups
from pathsgd.graph.views import view_tensor
from pathsgd.sharding import Shard

MAX_BLOCKS = 16
"""Rows that are read apart in more pieces than these stay one block."""


@dataclass(frozen=True)
class Block:
    """Rows of a parameter."""

    name: str
    shape: tuple[int, ...]
    axis: int
    """Along which a row is one unit: 0, or 1 where the matrix is used transposed."""
    start: int
    length: int
    family: int
    turns: bool
    """Whether it is the matrix of a linear layer or a kernel, so that it turns instead of growing."""
    share: float
    """Number of blocks that turn and lie in sequence in its region: a growth is divided between them."""
    orthogonal: bool
    """Whether Muon orthogonalises its direction: not that of embeddings, of the last layer, and of depthwise
    convolutions."""
    tails: Tensor
    """The classes of the units that its weights come from."""
    heads: Tensor
    """The classes of the units that they lead into."""
    shards: tuple[Shard, ...] = ()
    """The part of the parameter that this rank holds; none if all of it."""

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor of the parameter's shape, or of the part of it that this rank holds, as a
        view."""
        if not self.shape or self.length == self.shape[self.axis]:
            return tensor
        start, stop = self.rows_in((s.start, s.start + s.length) for s in self.shards if s.dim == self.axis)
        return tensor.narrow(self.axis, start, stop - start)

    def rows_in(self, cuts: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """The beginning and the end of its rows in a part of the parameter, found by cutting out these rows,
        then these of what is left."""
        start, stop = self.start, self.stop
        for low, high in cuts:
            start, stop = (min(max(n, low), high) - low for n in (start, stop))
        return start, stop

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def numel(self) -> int:
        if not self.shape:
            return 1
        return math.prod(self.shape) // max(1, self.shape[self.axis]) * self.length

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns, a kernel's being its inputs at all places."""
        rows = self.length if self.axis == 0 else self.shape[0]
        return rows, self.numel // max(1, rows)


def find_blocks(graph: PathGraph) -> dict[str, list[Block]]:
    """The blocks of every parameter by name."""
    units = unit_classes_of(graph.in_training)
    readers = graph.readers()
    found: dict[str, list[Block]] = {}
    family_of: dict[int, int] = {}
    families = 0
    for group in find_unit_groups(graph):
        rows = len(group.heads(units))
        cuts, output = _follow(graph, readers, group, rows)
        # Embeddings and positions are added up after views, so they are groups of their own, and one family.
        first = family_of.setdefault(_find_sum(graph, readers, group.parts[0].node), families)
        for part in group.parts:
            info = _info(graph, part)
            place = _find_place(part, info, rows)
            whole = _whole(info, units, part, output)
            own = found.setdefault(info.name, [])
            if place is None:
                own += [] if own else [replace(whole, family=first)]
            elif not any(block.start < place[1] + rows and place[1] < block.stop for block in own):
                axis, offset = place
                own += [
                    _rows(whole, units, axis, offset + start, offset + stop, first + k)
                    for k, (start, stop) in enumerate(pairwise(cuts))
                ]
        families += len(cuts) - 1
    for info in graph.parameters.values():
        own = found.setdefault(info.name, [])
        own.sort(key=lambda block: block.start)
        covered = sum(block.numel for block in own)
        if not own or covered != math.prod(info.shape) or len(own) > MAX_BLOCKS:
            found[info.name] = [replace(_whole(info, units, None, False), family=families)]
            families += 1
    return _count(graph, found)


def _count(graph: PathGraph, found: dict[str, list[Block]]) -> dict[str, list[Block]]:
    """The blocks with their parts of growth."""
    depths = find_depths(graph)
    turning = Counter(
        region
        for name, blocks in found.items()
        for region in graph.parameters[name].regions
        if any(block.turns for block in blocks)
    )
    counted = {}
    for name, blocks in found.items():
        regions = graph.parameters[name].regions
        depth = max([1.0, *(depths[region] for region in regions)])
        share = min(depth, max([1, *(turning[region] for region in regions)]))
        counted[name] = [replace(block, share=share) for block in blocks]
    return counted


def find_depths(graph: PathGraph) -> dict[int, float]:
    """The most layers in sequence in a region, by region; at least 1.

    A sum has the mean of its summands' number, since a residual branch adds little to what passes it by.
    """
    lengths: list[float] = []
    for node in graph.nodes:
        before = [lengths[j] for j in node.inputs if not isinstance(graph.nodes[j].operation, Source)]
        before = before or [0.0]
        length = sum(before) / len(before) if isinstance(node.operation, Add) else max(before)
        lengths.append(length + isinstance(node.operation, (Linear, Conv)))
    deepest = dict.fromkeys(graph.regions, 1.0)
    for k in graph.ends:
        deepest[graph.regions[k]] = max(deepest[graph.regions[k]], lengths[k])
    return deepest


def is_wide(shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape is more than a vector."""
    return sum(n > 1 for n in shape) > 1


def _info(graph: PathGraph, part: Part) -> ParameterInfo:
    parameter = part.operation.weight.parameter
    assert parameter is not None
    return graph.parameters[parameter.name]


def _whole(info: ParameterInfo, units: UnitClasses, part: Part | None, output: bool) -> Block:
    shape = tuple(info.shape)
    wide = is_wide(shape)
    weighted = "weight" in info.roles if part is None else isinstance(part.operation, (Linear, Conv))
    operation = None if part is None else part.operation
    depthwise = isinstance(operation, Conv) and operation.is_depthwise
    end = output or "embedding" in info.roles
    edge = units.parameters.get(info.name)
    tails = torch.tensor([FIXED]) if edge is None else edge.tail.flatten()
    heads = torch.tensor([FIXED]) if edge is None else edge.head.flatten()
    return Block(
        info.name, shape, 0, 0, shape[0] if shape else 1, 0, wide and weighted, 1.0,
        wide and weighted and not depthwise and not end,
        tails, heads,
    )  # fmt: skip


def _rows(whole: Block, units: UnitClasses, axis: int, start: int, stop: int, family: int) -> Block:
    edge = units.parameters.get(whole.name)
    tails, heads = whole.tails, whole.heads
    if edge is not None:
        tails, heads = (
            ids.narrow(axis, start, stop - start).flatten() if ids.shape[axis] > 1 else ids.flatten()
            for ids in (edge.tail, edge.head)
        )
    length = stop - start
    return replace(whole, axis=axis, start=start, length=length, family=family, tails=tails, heads=heads)


def _find_place(part: Part, info: ParameterInfo, rows: int) -> tuple[int, int] | None:
    """The axis of the parameter along which one row is one unit, and the first of these rows; None if there
    is no such axis."""
    parameter = part.operation.weight.parameter
    assert parameter is not None
    views, shape = parameter.views, info.shape
    if not shape or (isinstance(part.operation, Conv) and part.operation.transposed):
        return None
    match views:
        case (Permute((1, 0)),) if isinstance(part.operation, Linear) and shape[1] == rows:
            return 1, 0
        case (Slice(0, start, length, 1),) if length == rows:
            return 0, start
        case () if shape[0] == rows:
            return 0, 0
    return None


def _follow(graph: PathGraph, readers: list[list[int]], group: Group, rows: int) -> tuple[list[int], bool]:
    """The places at which the units of a group fall apart into pieces that different operations read, as
    [0, ..., rows]; and whether they are what the model returns."""
    part = next((p for p in group.parts if isinstance(p.operation, (Linear, Conv))), None)
    if part is None:
        return [0, rows], False
    node = graph.nodes[part.node]
    axis = len(node.shape) - 1 if isinstance(part.operation, Linear) else 1
    if node.shape[axis] != rows:
        return [0, rows], False
    layout = [1] * len(node.shape)
    layout[axis] = rows
    outputs: list[int] = []
    pieces: list[Tensor] = []

    def follow(k: int, ids: Tensor) -> None:
        if k in graph.outputs:
            outputs.append(k)
        if k in graph.ends or not readers[k]:
            pieces.append(torch.unique(ids))
        for reader in readers[k]:
            operation = graph.nodes[reader].operation
            if isinstance(operation, (Reshape, Permute, Slice)):
                follow(reader, view_tensor(operation, ids))
            elif isinstance(operation, Add) and _adds_bias(graph, reader, k):
                follow(reader, ids.expand(graph.nodes[reader].shape))
            else:
                pieces.append(torch.unique(ids))

    follow(part.node, torch.arange(rows).reshape(layout).expand(node.shape))
    member = torch.zeros(rows, len(pieces), dtype=torch.bool)
    for k, piece in enumerate(pieces):
        member[piece, k] = True
    changes = (member[1:] != member[:-1]).any(1).nonzero().flatten() + 1
    cuts = [0, *changes.tolist(), rows]
    return cuts if len(cuts) <= MAX_BLOCKS + 1 else [0, rows], bool(outputs)


def _find_sum(graph: PathGraph, readers: list[list[int]], k: int) -> int:
    """The sum that node k goes into, if nothing else reads it."""
    while k not in graph.ends and len(readers[k]) == 1:
        (k,) = readers[k]
        operation = graph.nodes[k].operation
        if isinstance(operation, Add):
            return k
        if not isinstance(operation, (Reshape, Permute, Expand)):
            break
    return -1 - k


def _adds_bias(graph: PathGraph, add: int, k: int) -> bool:
    others = [source for source in graph.nodes[add].inputs if source != k]
    return all(isinstance(graph.nodes[source].operation, Source) for source in others)
