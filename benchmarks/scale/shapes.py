"""The matrices and vectors of models, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from pathsgd.optim.relative.blocks import MOST


@dataclass(frozen=True)
class Matrix:
    """Matrices of one shape."""

    rows: int
    columns: int
    forward: bool = False
    """Whether a weight follows on its paths, so that what arrives at its rows is needed."""
    backward: bool = False
    """Whether a weight comes before on its paths, so that what leaves its columns is needed."""
    blocks: int = 1
    orthogonal: bool = True
    """Whether Muon orthogonalises it: not embeddings and the last layer."""
    parallel: Literal["rows", "columns"] = "rows"
    """What tensor parallelism shards: the rows (ColwiseParallel) or the columns (RowwiseParallel)."""
    count: int = 1


@dataclass(frozen=True)
class Vector:
    """Vectors of one length: biases, weights of norms. Or tables of positions, ``each`` numbers in a row."""

    rows: int
    each: int = 1
    blocks: int = 1
    count: int = 1


@dataclass(frozen=True)
class Shape:
    """What a step needs to know of a model."""

    matrices: Sequence[Matrix]
    vectors: Sequence[Vector] = field(default_factory=list)
    units: int = 0
    """That can be rescaled, by their scales in the state of the optimizer; one more stands for the others."""

    @property
    def numel(self) -> int:
        return sum(m.rows * m.columns * m.count for m in self.matrices) + sum(
            v.rows * v.each * v.count for v in self.vectors
        )

    @property
    def orthogonal(self) -> int:
        """Numbers in the matrices that Muon orthogonalises."""
        return sum(m.rows * m.columns * m.count for m in self.matrices if m.orthogonal)


def stack_shape(*widths: int) -> Shape:
    """Linear layers with biases and ReLU."""
    last = len(widths) - 2
    return Shape(
        [
            Matrix(rows, columns, forward=k < last, backward=k > 0, orthogonal=k < last)
            for k, (columns, rows) in enumerate(pairwise(widths))
        ],
        [Vector(rows) for rows in widths[1:]],
    )


def gpt_shape(width: int, layers: int, vocabulary: int, context: int) -> Shape:
    """GPT-2 with packed queries, keys and values, ReLU, and a last layer of its own."""
    d = width
    per_layer = [
        Matrix(3 * d, d, forward=True, backward=True, blocks=3, count=layers),
        Matrix(d, d, backward=True, count=layers),
        Matrix(4 * d, d, forward=True, backward=True, count=layers),
        Matrix(d, 4 * d, backward=True, count=layers),
    ]
    ends = [Matrix(vocabulary, d, orthogonal=False), Matrix(vocabulary, d, backward=True, orthogonal=False)]
    vectors = [
        Vector(3 * d, blocks=3, count=layers),
        Vector(4 * d, count=layers),
        Vector(d, count=6 * layers + 2),
        Vector(context, d),
    ]
    return Shape([*per_layer, *ends], vectors)


@dataclass(frozen=True)
class LlamaSize:
    """The sizes by which a Llama is known."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int

    def shape(self) -> Shape:
        """Paths end in SwiGLU's product and in the rotation of queries and keys; values lead into the output
        projection, unless queries are grouped."""
        d, h, n = self.width, self.hidden, self.layers
        kv, grouped = d // self.heads * self.kv_heads, self.kv_heads < self.heads
        matrices = [
            Matrix(d, d, backward=True, blocks=_pieces(2 * self.heads), count=n),
            Matrix(kv, d, backward=True, blocks=_pieces(2 * self.kv_heads), count=n),
            Matrix(kv, d, forward=not grouped, backward=True, count=n),
            Matrix(d, d, backward=True, parallel="columns", count=n),
            Matrix(h, d, backward=True, count=2 * n),
            Matrix(d, h, parallel="columns", count=n),
            Matrix(self.vocabulary, d, orthogonal=False),
            Matrix(self.vocabulary, d, backward=True, orthogonal=False),
        ]
        return Shape(matrices, [Vector(d, count=2 * n + 1)], (2 * n + 1) * d + (0 if grouped else n * kv))


def _pieces(count: int) -> int:
    """A rotation reads both halves of every head apart."""
    return count if count <= MOST else 1


LLAMAS = {
    "7B": LlamaSize(32, 4096, 11008, 32, 32, 32000),
    "70B": LlamaSize(80, 8192, 28672, 64, 8, 32000),
}
