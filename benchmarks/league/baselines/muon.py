"""Muon: the momentum of a matrix, orthogonalised."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.muon import orthogonalize_by_shape

from .adamw import adamw_of
from .matrices import MatrixOptimizer, split

RMS = 0.2
"""Root mean square of an entry of a step, in learning rates: about that of AdamW (arXiv 2502.16982)."""
BETAS, EPS = (0.9, 0.95), 1e-10
"""Of the AdamW for the rest, in the releases of Muon and of NorMuon."""


def orthogonal_momentum(
    state: MutableMapping[Tensor, Any], params: list[Tensor], grads: list[Tensor], momentum: float
) -> list[Tensor]:
    """Nesterov's momentum, orthogonalised, times sqrt(rows / columns) of tall matrices.

    Kernels are matrices of output channels × the rest. Momentum is an average, not a sum: only its
    direction counts.
    """
    for p in params:
        if "momentum" not in state[p]:
            state[p]["momentum"] = torch.zeros_like(p)
    averages = [state[p]["momentum"] for p in params]
    torch._foreach_lerp_(averages, grads, 1 - momentum)
    return orthogonalize_by_shape(torch._foreach_lerp(grads, averages, momentum))


class Muon(MatrixOptimizer):
    """Muon as ``torch.optim.Muon`` has it with ``adjust_lr_fn="match_rms_adamw"``; AdamW for the rest.

    Momentum, rate and decay are the defaults of torch. With that adjustment one rate serves both parts, as in
    arXiv 2502.16982, so ``rest_lr`` is the same by default. Of the rest, tensors of one dimension do not
    decay.
    """

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
        directions = orthogonal_momentum(self.state, params, grads, group["momentum"])
        # The factor sqrt(rows / columns) of tall ones is in already: together sqrt(max(rows, columns)).
        torch._foreach_mul_(directions, [RMS * p[0].numel() ** 0.5 for p in params])
        return directions

    def move(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        directions = self.directions(group, params, grads)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_mul_(directions, group["lr"])  # a tensor where the step is captured
        torch._foreach_sub_(params, directions)
