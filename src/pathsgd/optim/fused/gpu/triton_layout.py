"""Where the gammas of a chain lie on a GPU, and how its layers are divided among programs.

Each vector of gammas is a sum, kept in parts: one for each program that adds to it, and one for a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import triton

from pathsgd.graph.chains import Chain

ROWS, COLUMNS = 16, 512
"""A program works on a strip of so many columns, and on a multiple of so many rows."""
PROGRAMS = 2
"""Programs of a layer for each processor: so many run at the same time."""


@dataclass(frozen=True)
class Vector:
    """Where a vector's parts and its inverse root lie in the two flat tensors of a chain."""

    offset: int
    parts: int
    length: int
    place: int


@dataclass(frozen=True)
class Layout:
    strips: list[int]
    """Of COLUMNS columns, for each layer."""
    rows_each: list[int]
    """Rows of a layer that one program walks down."""
    into: list[Vector]
    """gamma_in of the inputs of each layer."""
    out: list[Vector]
    """gamma_out of the outputs of each layer."""

    @property
    def vectors(self) -> list[Vector]:
        return [*self.into, *self.out]


def layout_of(chain: Chain, processors: int) -> Layout:
    strips = [triton.cdiv(layer.inputs, COLUMNS) for layer in chain]
    rows_each = []
    for layer, count in zip(chain, strips, strict=True):
        shares = max(PROGRAMS * processors // count, 1)
        rows_each.append(triton.cdiv(triton.cdiv(layer.outputs, shares), ROWS) * ROWS)
    shares = [triton.cdiv(layer.outputs, each) for layer, each in zip(chain, rows_each, strict=True)]
    biases = [layer.bias is not None for layer in chain]
    # into[k] is summed by layer k - 1, out[k] by layer k + 1; the first and the last are ones.
    into_parts = [1, *(count + bias for count, bias in zip(strips[:-1], biases[:-1], strict=True))]
    out_parts = [*shares[1:], 1]
    sizes = [
        *zip(into_parts, (layer.inputs for layer in chain), strict=True),
        *zip(out_parts, (layer.outputs for layer in chain), strict=True),
    ]
    offsets = [0, *accumulate(parts * length for parts, length in sizes)]
    places = [0, *accumulate(length for _, length in sizes)]
    vectors = [
        Vector(offset, *size, place)
        for size, offset, place in zip(sizes, offsets[:-1], places[:-1], strict=True)
    ]
    return Layout(strips, rows_each, vectors[: len(chain)], vectors[len(chain) :])
