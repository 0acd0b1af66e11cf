"""Schedule-free AdamW: an average of the iterates in place of a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .adamw import by_dimension


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """AdamW without a schedule (arXiv 2405.15682).

    Gradients are taken at y = (1 - beta1) z + beta1 x, where z takes the steps and x is the average of z,
    each z weighted by the square of the largest rate so far. The model holds y in training, from the
    beginning and after ``train()``, and x after ``eval()``; batch normalization needs new statistics at x.
    Defaults are those of the authors' release, where a linear warm-up of ``warmup_steps`` is part of the
    method; warm-up and decay are meant to be tuned. Tensors of one dimension do not decay.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.0025,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        groups = by_dimension(list(model.parameters()), weight_decay)
        super().__init__(groups, {"lr": lr, "warmup_steps": warmup_steps, "betas": betas, "eps": eps})
        self.training = True
        for group in self.param_groups:  # tensors, which a captured step can change
            for name in ("step", "largest", "total"):
                group[name] = torch.zeros((), device=group["params"][0].device)

    def train(self) -> None:
        """Puts y into the model."""
        if not self.training:
            self._mix(lambda beta1: 1 - beta1)
        self.training = True

    def eval(self) -> None:
        """Puts x into the model."""
        if self.training:
            self._mix(lambda beta1: 1 - 1 / beta1)
        self.training = False

    @torch.no_grad()
    def _mix(self, share_of_z: Callable[[float], float]) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p in self.state]
            z = [self.state[p]["z"] for p in params]
            if params:
                torch._foreach_lerp_(params, z, share_of_z(group["betas"][0]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.training:
            raise RuntimeError("the model holds averages: call train() before step()")
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["step"] += 1
            lr = group["lr"] * (group["step"] / max(1, group["warmup_steps"])).clamp(max=1)
            torch.maximum(group["largest"], lr, out=group["largest"])
            group["total"] += group["largest"] ** 2
            share = group["largest"] ** 2 / group["total"].clamp(min=1e-30)  # at a rate of zero
            grads = {p: p.grad for p in group["params"] if p.grad is not None}
            if grads:
                self._move(group, list(grads), list(grads.values()), lr, share)
        return loss

    def _move(
        self, group: dict[str, Any], y: list[Tensor], grads: list[Tensor], lr: Tensor, share: Tensor
    ) -> None:
        for p in y:
            if p not in self.state:
                self.state[p] = {"z": p.clone(), "square": torch.zeros_like(p)}
        z, squares = ([self.state[p][name] for p in y] for name in ("z", "square"))
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        # 1 - beta2^step, without the rounding of single precision that the difference would have
        roots = torch._foreach_div(squares, -torch.expm1(group["step"] * math.log(beta2)))
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        directions = torch._foreach_div(grads, roots)
        torch._foreach_add_(directions, y, alpha=group["weight_decay"])
        # x is not stored: y is moved as x and z move it.
        pulls = torch._foreach_sub(z, y)
        torch._foreach_mul_(pulls, share)
        torch._foreach_add_(y, pulls)
        torch._foreach_sub_(z, torch._foreach_mul(directions, lr))
        torch._foreach_mul_(directions, lr * (1 - beta1 * (1 - share)))
        torch._foreach_sub_(y, directions)
