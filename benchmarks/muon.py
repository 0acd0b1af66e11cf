"""Muon for whole models: momentum of hidden matrices is orthogonalised, all other parameters take AdamW."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WITH_MATRICES = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention, nn.RNNBase


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear, convolutional, attention and recurrent layers, without the last linear layer (the
    head) and without embeddings."""
    layers = [m for m in model.modules() if isinstance(m, WITH_MATRICES)]
    head = [m for m in layers if isinstance(m, nn.Linear)][-1]
    return [
        p for layer in layers if layer is not head for p in layer.parameters(recurse=False) if p.dim() > 1
    ]


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


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; AdamW at a rate of its own for what is not a hidden matrix."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        adamw_lr: float,
        momentum: float = 0.95,
        orthogonalize_all: Callable[[list[Tensor]], list[Tensor]] = orthogonalize_by_shape,
    ) -> None:
        self.orthogonalize_all = orthogonalize_all
        matrices = hidden_matrices(model)
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        # One optimizer inside another would hide its groups from schedulers, so both share these.
        self.adamw = torch.optim.AdamW(
            rest, adamw_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True,
            capturable=rest[0].is_cuda,
        )  # fmt: skip
        super().__init__([{"params": matrices, "lr": lr}], {"lr": lr, "momentum": momentum})
        self.param_groups += self.adamw.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        group = self.param_groups[0]
        params = [p for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in params]
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        averages = [self.state[p]["momentum"] for p in params]
        torch._foreach_mul_(averages, group["momentum"])
        torch._foreach_add_(averages, grads)
        directions = self.orthogonalize_all(
            list(torch._foreach_add(grads, averages, alpha=group["momentum"]))
        )
        torch._foreach_mul_(directions, -group["lr"])  # a tensor where the step is captured
        torch._foreach_add_(params, directions)
        self.adamw.step()
        return loss
