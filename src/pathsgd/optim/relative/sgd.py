"""SGD's direction for relative steps: the momentum of every block, normalised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.rule import apply_momentum, multi_tensor


def step_normalised(
    group: dict[str, Any],
    buffer_of: Callable[[Tensor], Tensor],
    blocks_of: Callable[[Tensor], list[Block]],
) -> None:
    """Moves every block of a group's parameters, of root mean square 1, by ``lr`` in the same measure."""
    params = [p for p in group["params"] if p.grad is not None]
    grads = [p.grad for p in params if p.grad is not None]
    grads = [-grad for grad in grads] if group["maximize"] else grads
    buffers = [buffer_of(p) for p in params] if group["momentum"] else []
    directions, _ = apply_momentum(grads, buffers, group["momentum"], group["nesterov"], multi_tensor)
    for p, direction in zip(params, directions, strict=True):
        for block in blocks_of(p):
            own = block.of(direction)
            norm = torch.linalg.vector_norm(own, dtype=torch.float64)
            rate = group["lr"] * block.numel**0.5 / torch.where(norm > 0, norm, 1)
            block.of(p).sub_((own * rate.to(own.dtype)).to(p.dtype))
