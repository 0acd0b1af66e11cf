"""An optimizer of some matrices of a model, with others inside it for all other parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WITH_MATRICES = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.MultiheadAttention, nn.RNNBase
)  # fmt: skip


class MatrixOptimizer(torch.optim.Optimizer):
    """``move`` steps the matrices, the first group; the others step their own groups."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        lr: float,
        others: Sequence[torch.optim.Optimizer],
        **defaults: Any,
    ) -> None:
        super().__init__([{"params": list(matrices)}], {"lr": lr, **defaults})
        self.others = others
        # One optimizer inside another would hide its groups from schedules, so both share them.
        for other in others:
            self.param_groups += other.param_groups

    @abstractmethod
    def move(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """One step of the matrices that have gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        group = self.param_groups[0]
        grads = {p: p.grad for p in group["params"] if p.grad is not None}
        if grads:
            self.move(group, list(grads), list(grads.values()))
        for other in self.others:
            other.step()
        return loss


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The hidden matrices and the rest: biases, gains, embeddings and the head."""
    hidden = hidden_matrices(model)
    chosen = {id(p) for p in hidden}
    return hidden, [p for p in model.parameters() if id(p) not in chosen]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear, convolutional, attention and recurrent layers, without the last linear layer (the
    head) and without embeddings."""
    # GPT-2 of transformers has a linear layer of its own.
    layers = [m for m in model.modules() if isinstance(m, WITH_MATRICES) or type(m).__name__ == "Conv1D"]
    head = [m for m in layers if isinstance(m, nn.Linear)][-1]
    return [
        p for layer in layers if layer is not head for p in layer.parameters(recurse=False) if p.dim() > 1
    ]
