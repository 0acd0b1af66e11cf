"""Where the kernels find a block: the fields of every block, and the tiles of some of them.

A block is a matrix of rows and columns within its parameter; the columns of a kernel are those of all its
places. The fields are

    0-4    addresses of weight, gradient, two tensors of state, and the number of steps
    5-7    rows, columns, and how far one row is from the next
    8-10   first, repeated, period: column c reads input first + (c / repeated) % period
    11-13  head of the first weight in the list of heads, and how far the next row's and input's are
    14-16  the same for the tail
    17     where its direction begins in the list of directions
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pathsgd.graph.unit_classes import FIXED, EdgeClasses
from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.relative.gpu.kernels import COLUMNS, FIELDS, ROWS, SUMS, sum_kernel

AT_ONCE = 256


@dataclass(frozen=True)
class Tiles:
    """The tiles of some blocks."""

    tiles: Tensor
    firsts: Tensor
    numbers: Tensor

    @property
    def grid(self) -> tuple[int]:
        return (len(self.tiles),)

    def make_partial(self) -> Tensor:
        """Room for what is found of every tile."""
        return torch.zeros(len(self.tiles), SUMS.value, dtype=torch.float64, device=self.tiles.device)

    def add_up(self, partial: Tensor, sums: Tensor) -> None:
        """Writes the sums over every block into its row of ``sums``."""
        sum_kernel[(len(self.numbers),)](partial, self.firsts, self.numbers, sums, AT_ONCE)


class Layout:
    """The fields of blocks on one device, without addresses.

    Attributes:
        fields: by block.
        heads: the classes of the units that weights lead into.
        tails: the classes of the units that they come from, and the power of each one's factor.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        edges: Mapping[str, EdgeClasses],
        strides: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        heads, tails, degrees = _List(), _List(), _List()
        rows = []
        placed: dict[str, list[int]] = {}
        for block in blocks:
            shape = _Shape(block.shape, strides[block.name])
            if block.name not in placed:
                edge = edges.get(block.name)
                if edge is None:
                    placed[block.name] = [*heads.add(_FIXED, shape), *tails.add(_FIXED, shape)]
                    degrees.add(torch.ones(1, dtype=torch.int64), shape)
                else:
                    placed[block.name] = [*heads.add(edge.head, shape), *tails.add(edge.tail, shape)]
                    degrees.add(torch.full_like(edge.tail, edge.degree), shape)
            rows.append(shape.fields(block, placed[block.name]))
        self.blocks = list(blocks)
        self.offsets = [row.pop() for row in rows]
        self.fields = torch.tensor([[0] * 5 + row for row in rows], dtype=torch.int64)
        self.fields = torch.nn.functional.pad(self.fields, (0, FIELDS.value - self.fields.shape[1]))
        self.heads, self.tails = heads.joined().to(device), tails.joined().to(device)
        self.degrees = degrees.joined().to(device)
        self.device = device

    def choose(self, numbers: Sequence[int]) -> Tiles:
        """The tiles of these blocks."""
        tiles: list[tuple[int, int, int]] = []
        counts = []
        for k in numbers:
            rows, columns = self.fields[k, 5:7].tolist()
            own = [(k, i, c) for i in range(0, rows, ROWS.value) for c in range(0, columns, COLUMNS.value)]
            tiles += own
            counts.append(len(own))
        made = [tiles, [0, *accumulate(counts)], list(numbers)]
        return Tiles(*(torch.tensor(values, dtype=torch.int32, device=self.device) for values in made))


_FIXED = torch.tensor([FIXED])


class NotAMatrix(ValueError):
    """A parameter that the kernels cannot go over."""


class _List:
    """Tensors one after another."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.length = 0

    def add(self, classes: Tensor, shape: _Shape) -> list[int]:
        """[where they begin, how far one row and one input are from the next]."""
        classes = shape.squeeze(classes)
        start = self.length
        self.parts.append(classes.flatten())
        self.length += classes.numel()
        rows, inputs = classes.shape
        return [start, inputs if rows > 1 else 0, 1 if inputs > 1 else 0]

    def joined(self) -> Tensor:
        return torch.cat(self.parts)


class _Shape:
    """A parameter as rows and inputs, each input at several places."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.shape = shape
        self.kept = [d for d, n in enumerate(shape) if n > 1]
        sizes, strides = [shape[d] for d in self.kept], [stride[d] for d in self.kept]
        sizes, strides = ([1] * (2 - len(sizes)) + sizes, [0] * (2 - len(sizes)) + strides)
        self.rows, self.inputs, *places = sizes
        self.places = math.prod(places)
        self.row = self.inputs * self.places
        if strides[2:] == _contiguous(places) and strides[1] == self.places:
            self.repeated = self.places
        elif strides[1] == 1 and strides[2:] == [n * self.inputs for n in _contiguous(places)]:
            self.repeated = 1  # channels last
        else:
            raise NotAMatrix
        if self.rows > 1 and strides[0] != self.row:
            raise NotAMatrix

    def squeeze(self, classes: Tensor) -> Tensor:
        """Classes of a parameter's entries, by row and input."""
        if classes.dim() < len(self.shape):
            classes = classes.reshape([1] * (len(self.shape) - classes.dim()) + list(classes.shape))
        sizes = [classes.shape[d] for d in self.kept]
        sizes = [1] * (2 - len(sizes)) + sizes
        if any(n > 1 for n in sizes[2:]):
            raise NotAMatrix
        return classes.reshape(sizes[0], sizes[1])

    def fields(self, block: Block, places: list[int]) -> list[int]:
        """Fields 5 to 16 of a block, and how far it is from the parameter's beginning."""
        head, head_row, head_input, tail, tail_row, tail_input = places
        whole = not block.shape or block.length == block.shape[block.axis]
        rows, columns, first, start = self.rows, self.row, 0, 0
        if not whole and block.axis == self.kept[0] and len(self.kept) > 1:
            rows, start = block.length, block.start * self.row
            head, tail = head + block.start * head_row, tail + block.start * tail_row
        elif not whole and self.places == 1 and block.axis == self.kept[-1]:
            columns, first, start = block.length, block.start, block.start
        elif not whole:
            raise NotAMatrix
        return [
            rows, columns, self.row, first, self.repeated, self.inputs,
            head, head_row, head_input, tail, tail_row, tail_input, start,
        ]  # fmt: skip


def _contiguous(sizes: list[int]) -> list[int]:
    return [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
