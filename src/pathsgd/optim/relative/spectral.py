"""The spectral norms of steps, by power iteration from one step to the next.

How much a step changes what a matrix makes of its inputs is its spectral norm. The norm of its entries does
not tell: Adam's step has the same for a signal, whose entries move together, and for noise, whose do not,
and of these the one changes outputs by up to the root of the width more than the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

KEY = "spectral"
"""In the state of a parameter: the vectors from which the next iteration starts, one for each block."""

FIRST = 8
"""Iterations in the first step; later ones start from the vector of the step before, and one is enough."""


def find_spectral_norms(
    optimizer: Optimizer, parameters: Sequence[Tensor], counts: Sequence[int], matrices: Sequence[Tensor]
) -> Tensor:
    """The spectral norm of every matrix, or somewhat less.

    Args:
        optimizer: in whose state the vectors are kept.
        parameters: in the order of the matrices.
        counts: how many matrices each has.
        matrices: the steps of the blocks of these parameters.
    """
    left = iter(matrices)
    norms: list[Tensor] = []
    for parameter, count in zip(parameters, counts, strict=True):
        norms += _iterate(optimizer.state[parameter], [next(left) for _ in range(count)])
    return torch.stack(norms)


def _iterate(state: dict[str, Tensor], matrices: list[Tensor]) -> Iterator[Tensor]:
    widths = [matrix.shape[1] for matrix in matrices]
    rounds = 1
    if KEY not in state:
        rounds = FIRST
        state[KEY] = torch.cat([_start(matrix) for matrix in matrices])
    for matrix, x in zip(matrices, state[KEY].split(widths), strict=True):
        for _ in range(rounds):
            y = matrix @ x
            back = matrix.mT @ y
            before, after = torch.linalg.vector_norm(y), torch.linalg.vector_norm(back)
            moves = after > 0
            # In place, so that a CUDA graph finds it where it was.
            x.copy_(torch.where(moves, back / torch.where(moves, after, 1), x))
        yield torch.where(moves, after / torch.where(moves, before, 1), 0)


def _start(matrix: Tensor) -> Tensor:
    """A vector that is orthogonal to nothing, the same on every machine."""
    x = torch.arange(matrix.shape[1], dtype=torch.float64, device=matrix.device).cos()
    return (x / torch.linalg.vector_norm(x)).to(matrix.dtype)
