"""The spectral norms of steps, by power iteration from one step to the next.

How much a step changes what a matrix makes of its inputs is its spectral norm. The norm of its entries does
not tell: Adam's step has the same for a signal, whose entries move together, and for noise, whose do not,
and of these the one changes outputs by up to the root of the width more than the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach
from pathsgd.geometry.precision import full_precision

KEY = "spectral"
"""In the state of a parameter: the vectors from which the next iteration starts, one for each block."""

FIRST = 8
"""Iterations in the first step; later ones start from the vector of the step before, and one is enough."""

Multiply = Callable[[Sequence[int], Sequence[Tensor], bool], list[Tensor]]
"""(places, vectors, transposed) -> the products of the matrices at these places, or of their transposes, with
the vectors."""


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
    widths = [[next(left).shape[1] for _ in range(count)] for count in counts]

    def multiply(places: Sequence[int], vectors: Sequence[Tensor], transposed: bool) -> list[Tensor]:
        own = [matrices[k].mT if transposed else matrices[k] for k in places]
        return [matrix @ x for matrix, x in zip(own, vectors, strict=True)]

    return iterate_all(optimizer, parameters, widths, matrices[0], multiply)


def iterate_all(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    widths: Sequence[Sequence[int]],
    like: Tensor,
    multiply: Multiply,
) -> Tensor:
    """The norms of matrices with so many columns, by parameter; ``like`` has their dtype and device."""
    vectors: list[Tensor] = []
    new: list[int] = []
    for parameter, own in zip(parameters, widths, strict=True):
        state = optimizer.state[parameter]
        if make_vectors(state, own, like):
            new += range(len(vectors), len(vectors) + len(own))
        vectors += state[KEY].split(list(own))

    def iterate_some(places: Sequence[int]) -> Tensor:
        own = [vectors[k] for k in places]
        with full_precision(like.device):
            y = multiply(places, own, False)
            back = multiply(places, y, True)
        return _follow(y, back, own)

    for _ in range(FIRST - 1 if new else 0):
        iterate_some(new)
    return iterate_some(range(len(vectors)))


def make_vectors(state: dict[str, Tensor], widths: Sequence[int], like: Tensor) -> bool:
    """Makes the vectors of a parameter whose blocks have so many columns; whether there were none."""
    new = KEY not in state
    if new:
        state[KEY] = torch.cat([_start(width, like.device) for width in widths])
    state[KEY] = state[KEY].to(like.dtype)  # another one if the model was cast
    return new


def _follow(y: Sequence[Tensor], back: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
    """The norms from y = A x and A^T y of every matrix A; its vector x becomes that of the next iteration."""
    before, after = (torch.stack(foreach("norm", each)) for each in (y, back))
    norms, live = _divide(before, after)
    found = zip(live.unbind(), foreach("div", back, list(after.unbind())), vectors, strict=True)
    # In place, so that a CUDA graph finds them where they were.
    foreach("copy_", vectors, [torch.where(own, new, x) for own, new, x in found])
    return norms


def _divide(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """(norms, whether they are any): a matrix of zeros has none, and keeps its vector."""
    live = after > 0
    return torch.where(live, after / before, 0), live


def _start(width: int, device: torch.device) -> Tensor:
    """A vector that is orthogonal to nothing, the same on every machine."""
    x = torch.arange(width, dtype=torch.float64, device=device).cos()
    return x / torch.linalg.vector_norm(x)
