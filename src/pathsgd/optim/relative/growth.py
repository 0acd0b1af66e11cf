"""How the norms of blocks grow: Adam on the logarithm of each. ``grow_kernel`` does the same on a GPU.

Turning keeps a block's norm, and a network whose scale starts too small could never become sure of anything.
The derivative of the loss by the logarithm of a block's norm is <g, u>. By homogeneity it is about the same
for all layers of a region, whose norms enter the function as a product: so the growth is shared between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach

BETAS = (0.9, 0.99)
NOISE = 2.0**10
"""So many units in the last place of the size of gradients are rounding: of the gradient of a bias before a
batch norm beside its family's, and of <g, u> of a block before one beside the norm of g."""
KEY = "growth"
"""In the state of a parameter: both averages and the number of steps, for each of its blocks."""


def find_state(state: dict[str, Tensor], p: Tensor, count: int) -> Tensor:
    """The averages of a parameter with so many blocks, made at its first step."""
    if KEY not in state:
        state[KEY] = torch.zeros(3, count, dtype=torch.float64, device=p.device)
    elif state[KEY].dtype != torch.float64 or not state[KEY].is_contiguous():
        state[KEY] = state[KEY].double().contiguous()
    return state[KEY]


def find_growth(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    counts: Sequence[int],
    along: Tensor,
    gradients: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The direction in which the logarithm of every block's norm moves, about -1 to 1.

    Args:
        optimizer: in whose state the averages are kept.
        parameters: in the order of the blocks.
        counts: how many blocks each has.
        along: <g, u> of every block.
        gradients: the norm of each block's g,
        dtype: in which g was computed.
    """
    states = [find_state(optimizer.state[p], p, count) for p, count in zip(parameters, counts, strict=True)]
    first, second, steps = torch.cat(states, 1)
    first = first.lerp(along, 1 - BETAS[0])
    noise = NOISE * torch.finfo(dtype).eps * gradients
    second = second.lerp(along.square() + noise.square(), 1 - BETAS[1])
    steps = steps + 1
    # In place, so that a CUDA graph finds them where they were.
    foreach("copy_", states, list(torch.stack([first, second, steps]).split(list(counts), 1)))
    mean = first / (1 - BETAS[0] ** steps)
    size = (second / (1 - BETAS[1] ** steps)).sqrt()
    live = size > 0
    return torch.where(live, -mean / torch.where(live, size, 1), 0)
