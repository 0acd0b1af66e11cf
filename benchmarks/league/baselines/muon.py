"""Muon: the momentum of a matrix, orthogonalised."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .adamw import adamw_of
from .matrices import MatrixOptimizer, split

RMS = 0.2
"""Root mean square of an entry of a step, in learning rates: about that of AdamW (arXiv 2502.16982)."""
BETAS, EPS = (0.9, 0.95), 1e-10
"""Of the AdamW for the rest, in the releases of Muon and of NorMuon."""


@torch.no_grad()
def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """About the nearest orthogonal ones of a stack of matrices, by Newton-Schulz. In bfloat16, except on a
    CPU, where that is slow."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def orthogonalize_by_shape(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalised matrices, times sqrt(rows / columns) of tall ones; those of one shape are computed
    together."""
    by_shape: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for k, tensor in enumerate(tensors):
        by_shape[len(tensor), tensor[0].numel()].append(k)
    directions = list(tensors)
    for (rows, columns), places in by_shape.items():
        stacked = orthogonalize(torch.stack([tensors[k].reshape(rows, columns) for k in places]))
        stacked *= max(1, rows / columns) ** 0.5
        for k, direction in zip(places, stacked.unbind(), strict=True):
            directions[k] = direction.view_as(tensors[k])
    return directions


def nesterov_momentum(
    state: MutableMapping[Tensor, Any], params: list[Tensor], grads: list[Tensor], momentum: float
) -> list[Tensor]:
    """An average, not a sum: only its direction counts."""
    for p in params:
        if "momentum" not in state[p]:
            state[p]["momentum"] = torch.zeros_like(p)
    averages = [state[p]["momentum"] for p in params]
    torch._foreach_lerp_(averages, grads, 1 - momentum)
    return list(torch._foreach_lerp(grads, averages, momentum))


class Muon(MatrixOptimizer):
    """Muon as ``torch.optim.Muon`` has it with ``adjust_lr_fn="match_rms_adamw"``; AdamW for the rest.

    Momentum, rate and decay are the defaults of torch. With that adjustment one rate serves both parts, as in
    arXiv 2502.16982, so ``rest_lr`` is the same by default. Of the rest, tensors of one dimension do not
    decay.
    """

    orthogonalize_all = staticmethod(orthogonalize_by_shape)

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        rest_lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        hidden, rest = split(model)
        others = [adamw_of(rest, rest_lr, weight_decay, betas=BETAS, eps=EPS)]
        super().__init__(hidden, lr, others, weight_decay=weight_decay, momentum=momentum)

    def directions(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        moments = nesterov_momentum(self.state, params, grads, group["momentum"])
        directions = self.orthogonalize_all(moments)
        # The factor sqrt(rows / columns) of tall ones is in already: together sqrt(max(rows, columns)).
        torch._foreach_mul_(directions, [RMS * p[0].numel() ** 0.5 for p in params])
        return directions

    def move(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        directions = self.directions(group, params, grads)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_mul_(directions, group["lr"])  # a tensor where the step is captured
        torch._foreach_sub_(params, directions)
