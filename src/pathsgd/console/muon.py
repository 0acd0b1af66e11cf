"""Muon for whole models: torch's, which takes matrices alone, and as it is usually run."""

from __future__ import annotations

from collections import defaultdict
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


class BatchedMuon:
    """Muon for matrices and kernels, all of one shape orthogonalised at once in bf16; fused AdamW for the
    embeddings, the last linear layer and vectors."""

    def __init__(self, model: nn.Module, lr: float, momentum: float = 0.95) -> None:
        linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
        layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        hidden = [m.weight for m in model.modules() if isinstance(m, layers) and m is not linear[-1]]
        chosen = set(map(id, hidden))
        rest = [p for p in model.parameters() if id(p) not in chosen]
        on_gpu = rest[0].is_cuda
        self.lr, self.momentum = lr, momentum
        self.adamw = torch.optim.AdamW(rest, lr, fused=True, capturable=on_gpu)
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        by_shape: defaultdict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for p in hidden:
            by_shape[len(p), p[0].numel()].append(p)
        self.batches = [
            (own, torch.zeros(len(own), *shape, device=own[0].device)) for shape, own in by_shape.items()
        ]

    @torch.no_grad()
    def step(self) -> None:
        for parameters, average in self.batches:
            grads = torch.stack([p.grad.reshape(average.shape[1:]) for p in parameters if p.grad is not None])
            average.mul_(self.momentum).add_(grads)
            steps = orthogonalize(grads.add_(average, alpha=self.momentum).to(self.dtype)).float()
            steps *= -self.lr * max(1, average.shape[1] / average.shape[2]) ** 0.5
            foreach("add_", parameters, [s.view_as(p) for s, p in zip(steps, parameters, strict=True)])
        self.adamw.step()


def orthogonalize(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrices, by five steps of Newton and Schulz."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
