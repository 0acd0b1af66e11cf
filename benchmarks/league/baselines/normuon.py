"""NorMuon: Muon's orthogonal matrix, with a second moment for each neuron."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .muon import RMS, Muon


class NorMuon(Muon):
    """NorMuon (arXiv 2510.05491); AdamW for the rest.

    Each row of the orthogonalised momentum is divided by the root of an average of its mean square. Then the
    matrix is scaled to entries of 0.2 in root mean square, as in Algorithm 1 of the paper; the authors'
    release restores the norm from before instead, times sqrt(rows / columns) of tall matrices, and its
    default rate of 0.02 belongs to that. So rates and decay are Muon's here; ``momentum``, with Nesterov's
    step, and ``beta2`` are those of the release.
    """

    def __init__(self, model: nn.Module, beta2: float = 0.95, **options: float) -> None:
        super().__init__(model, **options)
        self.param_groups[0]["beta2"] = beta2

    def directions(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        directions = super().directions(group, params, grads)
        squares = [d.square().mean(dim=tuple(range(1, d.dim())), keepdim=True) for d in directions]
        for p, square in zip(params, squares, strict=True):
            if "square" not in self.state[p]:
                self.state[p]["square"] = torch.zeros_like(square)
        averages = [self.state[p]["square"] for p in params]
        torch._foreach_lerp_(averages, squares, 1 - group["beta2"])
        roots = torch._foreach_sqrt(averages)
        torch._foreach_add_(roots, 1e-10)
        torch._foreach_div_(directions, roots)
        # No bias correction: the scale makes it void.
        scales = torch._foreach_norm(directions)
        torch._foreach_add_(scales, 1e-10)
        torch._foreach_reciprocal_(scales)
        torch._foreach_mul_(scales, [RMS * p.numel() ** 0.5 for p in params])
        torch._foreach_mul_(directions, scales)
        return directions
