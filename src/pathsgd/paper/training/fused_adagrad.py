"""torch's AdaGrad on a GPU at the price of its fused optimizers.

torch has it fused on the CPU only; on a GPU it passes over the memory five times, which makes an epoch of the
paper's networks half as long again. A comparison of methods should not be slowed down by one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FusedAdagrad(torch.optim.Adagrad):
    """The same steps on the same state, without decays; its weights are fp32 and lie in one piece."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        from pathsgd.paper.training.adagrad_kernel import apply_adagrad

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["lr_decay"] or group["weight_decay"] or group["maximize"]:
                raise ValueError("FusedAdagrad has no lr_decay, weight_decay or maximize")
            grads: list[tuple[Tensor, Tensor]] = [(p, p.grad) for p in group["params"] if p.grad is not None]
            for p, grad in grads:
                state = self.state[p]
                apply_adagrad(p, grad, state["sum"], float(group["lr"]), group["eps"])
                state["step"] += 1
                torch.autograd.graph.increment_version(p)
        return loss
