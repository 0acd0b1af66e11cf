"""SGD's direction for relative steps: the momentum of every block, normalised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pathsgd.geometry.sharded import local_part
from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.relative.sums import find_norms
from pathsgd.optim.rule import apply_momentum, multi_tensor


def step_normalised(
    group: dict[str, Any],
    buffer_of: Callable[[Tensor], Tensor],
    blocks_of: Callable[[Tensor], list[Block]],
) -> None:
    """Moves every block of a group's parameters, of root mean square 1, by ``lr`` in the same measure."""
    params = [p for p in group["params"] if p.grad is not None]
    if not params:
        return
    grads = [local_part(p.grad) for p in params if p.grad is not None]
    grads = [-grad for grad in grads] if group["maximize"] else grads
    buffers = [local_part(buffer_of(p)) for p in params] if group["momentum"] else []
    directions, _ = apply_momentum(grads, buffers, group["momentum"], group["nesterov"], multi_tensor)
    blocks = [(block, p, d) for p, d in zip(params, directions, strict=True) for block in blocks_of(p)]
    parts = [block.of(d) for block, _, d in blocks]
    norms = find_norms([block for block, *_ in blocks], parts)
    for (block, p, _), own, norm in zip(blocks, parts, norms.unbind(), strict=True):
        rate = group["lr"] * block.numel**0.5 / torch.where(norm > 0, norm, 1)
        block.of(local_part(p)).sub_((own * rate.to(own.dtype)).to(p.dtype))
