"""Muon for whole models: torch's, which takes matrices alone; and as it is usually run, the momentum of every
hidden matrix orthogonalised, AdamW for all the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach
from pathsgd.errors import PathError


class MuonAndSGD:
    """Muon for the matrices of a model, which is all it takes, and SGD for the other parameters."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise PathError(f"muon needs a torch that has it; this is {torch.__version__}")
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        self.parts: list[Optimizer] = [torch.optim.Muon(matrices, lr)]
        if rest:
            self.parts.append(torch.optim.SGD(rest, lr, fused=True))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {p: state for part in self.parts for p, state in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(k): part.state_dict() for k, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for k, part in enumerate(self.parts):
            part.load_state_dict(state[str(k)])


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
    """Newton-Schulz on matrices of one shape: about the nearest orthogonal ones. In bfloat16,
    except on a CPU, where that is slow."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, times sqrt(rows / columns) of tall matrices; AdamW for what is not a
    hidden matrix, at a rate of its own."""

    def __init__(self, model: nn.Module, lr: float, adamw_lr: float, momentum: float = 0.95) -> None:
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
        self.by_shape: defaultdict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for p in matrices:
            self.by_shape[len(p), p[0].numel()].append(p)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        group = self.param_groups[0]
        lr, momentum = group["lr"], group["momentum"]
        for (rows, columns), parameters in self.by_shape.items():
            grads = torch.stack([p.grad.reshape(rows, columns) for p in parameters if p.grad is not None])
            state = self.state[parameters[0]]
            average = state.setdefault("momentum", torch.zeros_like(grads))
            average.mul_(momentum).add_(grads)
            steps = orthogonalize(grads.add_(average, alpha=momentum))
            steps *= -lr * max(1, rows / columns) ** 0.5
            foreach("add_", parameters, [s.view_as(p) for s, p in zip(steps, parameters, strict=True)])
        self.adamw.step()
        return loss
