"""The spectral norms of steps, by power iteration from one step to the next.

How much a step changes what a matrix makes of its inputs is its spectral norm. The norm of its entries does
not tell: Adam's step has the same for a signal, whose entries move together, and for noise, whose do not,
and of these the one changes outputs by up to the root of the width more than the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd.geometry.precision import full_precision

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
        own, state = [next(left) for _ in range(count)], optimizer.state[parameter]
        widths = [matrix.shape[1] for matrix in own]
        rounds = FIRST if make_vectors(state, widths, own[0]) else 1
        for matrix, x in zip(own, state[KEY].split(widths), strict=True):
            for _ in range(rounds):
                norm, new = iterate(matrix, x)
                x.copy_(new)  # in place, so that a CUDA graph finds it where it was
            norms.append(norm)
    return torch.stack(norms)


def make_vectors(state: dict[str, Tensor], widths: Sequence[int], like: Tensor) -> bool:
    """Makes the vectors of a parameter whose blocks have so many columns; whether there were none."""
    new = KEY not in state
    if new:
        state[KEY] = torch.cat([_start(width, like.device) for width in widths])
    state[KEY] = state[KEY].to(like.dtype)  # another one if the model was cast
    return new


def iterate(matrices: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(norms, next vectors) of a matrix, or of a batch of them, by one iteration."""
    with full_precision(x.device):
        y = matrices @ x.unsqueeze(-1)
        back = (matrices.mT @ y).squeeze(-1)
    return follow(y.squeeze(-1), back, x)


def follow(y: Tensor, back: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same from y = A x and A^T y; a matrix of zeros keeps its vector."""
    before, after = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (y, back))
    return (after / before).nan_to_num(0.0).squeeze(-1), torch.where(after > 0, back / after, x)


def _start(width: int, device: torch.device) -> Tensor:
    """A vector that is orthogonal to nothing, the same on every machine."""
    x = torch.arange(width, dtype=torch.float64, device=device).cos()
    return x / torch.linalg.vector_norm(x)
