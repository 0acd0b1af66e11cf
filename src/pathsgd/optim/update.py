"""The Path-SGD update of lists of tensors, in two halves: steps in invariant coordinates, and their way back.

Between the two a step can be looked at where no rescaling changes it, which is where
:mod:`pathsgd.optim.step_limit` does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from pathsgd.geometry.gamma import Gamma, take_roots


def path_sgd(
    params: list[Tensor],
    grads: list[Tensor],
    gammas: list[Gamma | None],
    momentum_buffers: list[Tensor | None],
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    fallback_scale: float = 1.0,
    maximize: bool = False,
    foreach: bool | None = None,
    differentiable: bool = False,
) -> None:
    """Functional API that performs the Path-SGD update in place; see :class:`pathsgd.PathSGD`.

    ``gammas[k] is None`` means gamma = 1. New momentum buffers are written into ``momentum_buffers``.
    """
    if foreach is None:
        foreach = by_foreach(params, differentiable)
    rates = rates_of(gammas, lr, fallback_scale)
    steps = invariant_steps(
        grads, gammas, momentum_buffers, rates,
        momentum=momentum, nesterov=nesterov, maximize=maximize, foreach=foreach,
    )  # fmt: skip
    move(params, gammas, steps, rates, weight_decay=weight_decay, foreach=foreach)


def by_foreach(params: list[Tensor], differentiable: bool) -> bool:
    """Whether torch would take the multi-tensor form for these."""
    return _default_to_fused_or_foreach(params, differentiable, use_fused=False)[1]


def rates_of(gammas: list[Gamma | None], lr: float | Tensor, fallback_scale: float) -> list[float | Tensor]:
    """The step size of each parameter."""
    if isinstance(lr, Tensor):
        lr = lr.reshape(())  # one element in any shape
    return [lr if gamma is not None else lr * fallback_scale for gamma in gammas]


def invariant_steps(
    grads: list[Tensor],
    gammas: list[Gamma | None],
    momentum_buffers: list[Tensor | None],
    rates: list[float | Tensor],
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    foreach: bool = False,
) -> list[Tensor]:
    """``rate * b``, to be subtracted from z: with ``h = g / sqrt(gamma)`` and ``b`` its momentum."""
    if maximize:
        grads = [-grad for grad in grads]
    hs = divided(grads, gammas, foreach)
    if momentum != 0 and foreach and hs:
        for k, h in enumerate(hs):
            if momentum_buffers[k] is None:
                momentum_buffers[k] = torch.zeros_like(h)
        buffers = [buffer for buffer in momentum_buffers if buffer is not None]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, hs)
        hs = list(torch._foreach_add(hs, buffers, alpha=momentum)) if nesterov else buffers
    elif momentum != 0:
        for k, h in enumerate(hs):
            buffer = momentum_buffers[k]
            buffer = h.clone() if buffer is None else buffer.mul_(momentum).add_(h)
            momentum_buffers[k] = buffer
            hs[k] = h.add(buffer, alpha=momentum) if nesterov else buffer
    if foreach and hs and all(isinstance(rate, float) and rate == rates[0] for rate in rates):
        return list(torch._foreach_mul(hs, rates[0]))
    return [rate * h for rate, h in zip(rates, hs, strict=True)]


def move(
    params: list[Tensor],
    gammas: list[Gamma | None],
    steps: list[Tensor],
    rates: list[float | Tensor],
    *,
    weight_decay: float = 0.0,
    foreach: bool = False,
) -> None:
    """``w = (1 - rate weight_decay) w - step / sqrt(gamma)``."""
    if weight_decay != 0:
        for param, rate in zip(params, rates, strict=True):
            param.mul_(1 - rate * weight_decay)
    if foreach and params:
        _move_together(params, gammas, steps)
        return
    moves = [
        step.to(param.dtype) for step, param in zip(divided(steps, gammas, foreach), params, strict=True)
    ]
    for param, step in zip(params, moves, strict=True):
        param.sub_(step)


def _move_together(params: list[Tensor], gammas: list[Gamma | None], steps: list[Tensor]) -> None:
    """``w -= step / sqrt(gamma)``: both in one call for all tensors whose gamma is stored whole."""
    take_roots(gamma for gamma in gammas if gamma is not None)
    inverses = [None if gamma is None else gamma.inverse_root() for gamma in gammas]
    fused = [
        (param, step, inverse)
        for param, step, inverse in zip(params, steps, inverses, strict=True)
        if inverse is not None and param.dtype == step.dtype == inverse.dtype
    ]
    if fused:
        torch._foreach_addcmul_(
            [param for param, _, _ in fused],
            [step for _, step, _ in fused],
            [inverse for _, _, inverse in fused],
            value=-1.0,
        )
    done = {id(param) for param, *_ in fused}
    rest = [k for k, param in enumerate(params) if id(param) not in done]
    if rest:
        left = [params[k] for k in rest]
        moves = divided([steps[k] for k in rest], [gammas[k] for k in rest], foreach=True)
        torch._foreach_sub_(left, [step.to(param.dtype) for step, param in zip(moves, left, strict=True)])


def divided(xs: list[Tensor], gammas: list[Gamma | None], foreach: bool) -> list[Tensor]:
    """``x / sqrt(gamma)``: a gradient taken to the coordinates a rescaling does not change, or a step back
    from them. In one call for all tensors whose gamma is stored whole."""
    found = list(xs)
    if foreach:
        take_roots(gamma for gamma in gammas if gamma is not None)
    together: dict[int, Tensor] = {}
    for k, (x, gamma) in enumerate(zip(xs, gammas, strict=True)):
        if gamma is None:
            continue
        x = x.to(gamma.arithmetic.dtype)
        inverse = gamma.inverse_root() if foreach else None
        if inverse is None:
            found[k] = gamma.gradient_to_z(x)
        else:
            found[k], together[k] = x, inverse
    if together:
        products = torch._foreach_mul([found[k] for k in together], list(together.values()))
        for k, product in zip(together, products, strict=True):
            found[k] = product
    return found
