"""Where the kernels find a block: the fields of its pieces, and the tiles of some blocks.

A block is one piece, a matrix within its parameter; of a grouped convolution each group is a piece. The
columns of a kernel are its inputs at all places. The fields of a piece are

    0-4    addresses of weight, gradient, two tensors of state, and the number of steps
    5-7    rows, columns, and how far one row is from the next
    8-9    repeated, period: column c belongs to input (c / repeated) % period
    10-11  where the factors of its rows and of its inputs begin
    12     where its direction begins among those of all matrices
    13     the number of its block
    14-15  address of the first average of its growth, and how far it is from there to the next row
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pathsgd.graph.unit_classes import FIXED, EdgeClasses
from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.relative.gpu.kernels import COLUMNS, FIELDS, ROWS, SUMS, sum_kernel

AT_ONCE = 1024
"""Tiles whose sums are added together."""
MOST = 256
"""A parameter in more pieces than these is none for the kernels."""
FIXED_CLASS = torch.tensor([[FIXED]])


class NotAMatrix(ValueError):
    """A parameter that the kernels cannot go over."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of some blocks."""

    tiles: Tensor
    """(piece, row, column) of each."""
    firsts: Tensor
    """By block, the number of its first tile; then how many there are."""
    numbers: Tensor
    """The blocks' numbers."""

    @property
    def grid(self) -> tuple[int]:
        return (len(self.tiles),)

    def make_partial(self) -> Tensor:
        """Room for what is found of every tile."""
        return torch.empty(len(self.tiles), SUMS.value, dtype=torch.float64, device=self.tiles.device)

    def add_up(self, partial: Tensor, sums: Tensor, count: int) -> None:
        """Writes the first sums over every block into its row of ``sums``."""
        sum_kernel[len(self.numbers), count](partial, self.firsts, self.numbers, sums, AT_ONCE)


class Layout:
    """The fields of all pieces, without addresses.

    Attributes:
        fields: by piece.
        offsets: by piece, how far it is from the beginning of its parameter.
        names: by piece, of its parameter.
        pieces_of: by block, its pieces.
        heads, tails, degrees: of all factors, each f[head] / f[tail]^degree with f the factors of classes.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        edges: Mapping[str, EdgeClasses],
        strides: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self.device = device
        self.offsets: list[int] = []
        self.names: list[str] = []
        self.pieces_of: list[range] = []
        heads: list[Tensor] = []
        tails: list[Tensor] = []
        degrees: list[Tensor] = []
        fields: list[list[int]] = []
        start = 0
        for number, block in enumerate(blocks):
            shape = _Shape(block.shape, strides[block.name])
            edge = edges.get(block.name)
            head, tail = (
                (FIXED_CLASS, FIXED_CLASS) if edge is None else map(shape.fold, (edge.head, edge.tail))
            )
            rows, inputs = shape.find(block)
            before = len(fields)
            for own in _cut(head, tail, rows):
                ends = [_split(classes, own, inputs) for classes in (head, tail)]
                for side in (0, 1):  # rows, then inputs
                    heads.append(ends[0][side])
                    tails.append(ends[1][side])
                    degrees.append(torch.full_like(ends[1][side], 1 if edge is None else edge.degree))
                columns = len(inputs) * shape.places
                fields.append(
                    [0] * 5
                    + [len(own), columns, shape.row, shape.repeated, len(inputs)]
                    + [start, start + len(own), 0, number, 0, 0]
                )
                start += len(own) + len(inputs)
                self.offsets.append(own.start * shape.row + inputs.start)
                self.names.append(block.name)
            self.pieces_of.append(range(before, len(fields)))
        self.fields = torch.tensor(fields, dtype=torch.int64)
        assert self.fields.shape[1] == FIELDS.value
        self.heads, self.tails, self.degrees = (torch.cat(x).to(device) for x in (heads, tails, degrees))

    def choose(self, numbers: Sequence[int]) -> Tiles:
        """The tiles of these blocks."""
        tiles = [torch.empty(0, 3, dtype=torch.int64)]
        counts = []
        for number in numbers:
            before = sum(map(len, tiles))
            for piece in self.pieces_of[number]:
                rows, columns = self.fields[piece, 5:7].tolist()
                tiles.append(
                    torch.cartesian_prod(
                        torch.tensor([piece]),
                        torch.arange(0, rows, ROWS.value),
                        torch.arange(0, columns, COLUMNS.value),
                    )
                )
            counts.append(sum(map(len, tiles)) - before)
        made = torch.cat(tiles), torch.tensor([0, *accumulate(counts)]), torch.tensor(list(numbers))
        return Tiles(*(values.to(self.device, torch.int32) for values in made))


class _Shape:
    """A parameter as rows and inputs, each input at several places."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.ndim = len(shape)
        self.kept = [d for d, n in enumerate(shape) if n > 1]
        missing = 2 - len(self.kept)
        sizes = [1] * missing + [shape[d] for d in self.kept]
        strides = [0] * missing + [stride[d] for d in self.kept]
        self.rows, self.inputs, *places = sizes
        self.places = math.prod(places)
        self.row = self.inputs * self.places
        steps = [math.prod(places[k + 1 :]) for k in range(len(places))]
        if strides[2:] == steps and strides[1] in (self.places, 0):
            self.repeated = self.places
        elif strides[2:] == [n * self.inputs for n in steps] and strides[1] == 1:
            self.repeated = 1  # channels last
        else:
            raise NotAMatrix
        if (self.rows > 1 and strides[0] != self.row) or self.rows * self.row >= 1 << 31:
            raise NotAMatrix

    def fold(self, classes: Tensor) -> Tensor:
        """Classes of a parameter's entries, by row and input, each of size one if it does not matter."""
        classes = classes.reshape([1] * (self.ndim - classes.dim()) + list(classes.shape))
        sizes = [1] * (2 - len(self.kept)) + [classes.shape[d] for d in self.kept]
        if any(n > 1 for n in sizes[2:]):
            raise NotAMatrix
        return classes.reshape(sizes[0], sizes[1])

    def find(self, block: Block) -> tuple[range, range]:
        """The rows and inputs of a block."""
        rows, inputs = range(self.rows), range(self.inputs)
        own = range(block.start, block.start + block.length)
        if not block.shape or block.length == block.shape[block.axis]:
            return rows, inputs
        if len(self.kept) > 1 and block.axis == self.kept[0]:
            return own, inputs
        if self.places == 1 and block.axis == self.kept[-1]:
            return rows, own
        raise NotAMatrix


def _cut(head: Tensor, tail: Tensor, rows: range) -> list[range]:
    """The rows in pieces in which classes change from row to row or from input to input, not both."""
    cuts = {rows.start, rows.stop}
    for classes in (head, tail):
        if min(classes.shape) > 1:
            own = classes[rows.start : rows.stop]
            changes = (own[1:] != own[:-1]).any(1).nonzero().flatten() + rows.start + 1
            cuts |= set(changes.tolist())
    if len(cuts) > MOST + 1:
        raise NotAMatrix
    return [range(*ends) for ends in pairwise(sorted(cuts))]


def _split(classes: Tensor, rows: range, inputs: range) -> tuple[Tensor, Tensor]:
    """Classes by row, and classes by input: those that do not change from row to row are by input."""
    count, width = classes.shape
    by_row = count > 1 and width == 1
    one = classes[rows.start if count > 1 else 0]
    row = classes[rows.start : rows.stop, 0] if by_row else one.new_full((len(rows),), FIXED)
    if by_row:
        column = one.new_full((len(inputs),), FIXED)
    else:
        column = one[inputs.start : inputs.stop] if width > 1 else one.expand(len(inputs))
    return row, column
