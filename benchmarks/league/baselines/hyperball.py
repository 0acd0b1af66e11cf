"""Hyperball: matrices keep their initial norm and turn by a given angle at each step."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .adamw import adamw_of
from .matrices import MatrixOptimizer, split
from .muon import nesterov_momentum, orthogonalize_by_shape

BETAS, EPS = (0.9, 0.95), 1e-8


class MuonH(MatrixOptimizer):
    """Muon-Hyperball (arXiv 2606.16899).

    A hidden matrix W becomes R normalize(W - lr R normalize(u)), with Muon's direction u and R the initial
    norm of W. As the authors have it, the head takes the same step with Adam's direction, and embeddings,
    gains and biases take Adam; nothing decays. Betas and ``rest_lr`` are those of their release. For ``lr``
    they recommend 2.5e-3 to 1e-2, whose middle is the default. A matrix that begins at zero stays there.
    """

    def __init__(
        self, model: nn.Module, lr: float = 5e-3, rest_lr: float = 6e-4, momentum: float = 0.95
    ) -> None:
        hidden, rest = split(model)
        head = head_weights(model)
        rest = [p for p in rest if p not in set(head)]
        others: list[torch.optim.Optimizer] = []
        if head:
            others.append(AdamH(head, lr))
        if rest:
            others.append(adamw_of(rest, rest_lr, 0.0, betas=BETAS, eps=EPS))
        super().__init__(hidden, lr, others, momentum=momentum)

    def move(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        moments = nesterov_momentum(self.state, params, grads, group["momentum"])
        directions = orthogonalize_by_shape(moments)
        step_on_spheres(self.state, params, directions, group["lr"])


class AdamH(torch.optim.Optimizer):
    """Adam-Hyperball: steps of constant norms in Adam's directions."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["weight"] = torch.zeros((), device=p.device, dtype=p.dtype)
                average, square, weight = state["average"], state["square"], state["weight"]
                average.lerp_(p.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                weight.mul_(beta2).add_(1 - beta2)  # of the gradients in the average: corrects its bias
                # The bias of the first moment is a factor, which the normalization removes.
                direction = average / ((square / weight).sqrt_() + eps)
                step_on_spheres(self.state, [p], [direction], group["lr"])
        return loss


def step_on_spheres(
    state: MutableMapping[Tensor, Any], params: list[Tensor], directions: list[Tensor], lr: float | Tensor
) -> None:
    """Steps as long as ``lr`` times the radius, and back to the sphere. Overwrites the directions."""
    for p in params:
        if "radius" not in state[p]:
            state[p]["radius"] = p.norm()
    radii = [state[p]["radius"] for p in params]
    factors = _ratios(radii, directions)
    torch._foreach_mul_(factors, lr)
    torch._foreach_mul_(directions, factors)
    torch._foreach_sub_(params, directions)
    torch._foreach_mul_(params, _ratios(radii, params))


def _ratios(radii: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    norms = list(torch._foreach_norm(tensors))
    torch._foreach_clamp_min_(norms, 1e-10)  # of a matrix of zeros
    return list(torch._foreach_div(radii, norms))


def head_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weight of the last linear layer, unless it is an embedding as well: those take Adam."""
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [p for p in head.parameters(recurse=False) if p.dim() > 1 and id(p) not in embeddings]
