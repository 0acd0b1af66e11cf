"""torch's own SGD, Adagrad and Adam(W) as rules of the fused implementations.

State has torch's names, shapes and devices, so one step may be fused and the next one torch's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.optimizer import Optimizer

from pathsgd import _torch
from pathsgd.optim.rule import Decay, Rule, State

STATES: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum_buffer",),
    Adagrad: ("sum",),
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
}
"""What is kept for a parameter. A subclass may do anything, so only these very classes count."""


def rule_of(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, p: float) -> Rule | None:
    """What the next step of this optimizer does to a parameter; None if there is no rule for it."""
    if type(optimizer) not in STATES or group.get("differentiable"):
        return None
    common: dict[str, Any] = {
        "lr": group["lr"], "weight_decay": group["weight_decay"], "maximize": group["maximize"], "p": p,
    }  # fmt: skip
    if isinstance(optimizer, SGD):
        if group["dampening"]:
            return None
        # Without momentum the decay of h is a decay of w, wherever a path passes.
        decay: Decay = "coupled" if group["momentum"] else "live"
        return Rule(momentum=group["momentum"], nesterov=group["nesterov"], decay=decay, **common)
    step = _next_step(optimizer.state[parameter].get("step", 0.0))
    if isinstance(optimizer, Adagrad):
        return Rule(
            method="adagrad",
            eps=group["eps"],
            lr_decay=group["lr_decay"],
            step=step,
            decay="coupled",
            **common,
        )
    betas = group["betas"]
    if group["amsgrad"] or any(isinstance(beta, Tensor) for beta in betas):
        return None
    decoupled = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay", False)
    return Rule(
        method="adam", betas=betas, eps=group["eps"], step=step, decay="live" if decoupled else "coupled",
        **common,
    )  # fmt: skip


def _next_step(count: float | Tensor) -> float | Tensor:
    """On a GPU the tensor itself is incremented before the kernels read it, see :func:`count_step`."""
    if isinstance(count, Tensor) and count.device.type != "cpu":
        return count
    return float(count) + 1


def make_state(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """Makes the state that torch would make at a parameter's first step."""
    if isinstance(optimizer, SGD):
        if group["momentum"] and optimizer.state[parameter].get("momentum_buffer") is None:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return
    state = optimizer.state[parameter]
    if not state:  # Adagrad has its own from the beginning
        on_device = group["capturable"] or group["fused"]
        dtype = torch.float32
        if not group["fused"] and torch.get_default_dtype() == torch.float64:
            dtype = torch.float64
        state["step"] = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
        for name in STATES[type(optimizer)]:
            state[name] = torch.zeros_like(parameter)


def state_of(optimizer: Optimizer, parameter: Tensor) -> State:
    return tuple(optimizer.state[parameter][name] for name in STATES[type(optimizer)])


def count_step(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """One step more for each of these."""
    steps = [optimizer.state[parameter]["step"] for parameter in parameters if not isinstance(optimizer, SGD)]
    if steps:
        _torch.foreach("add_", steps, 1)


def step_from_zero_(z: Tensor, h: Tensor, state: State, rule: Rule) -> None:
    """AdaGrad's or Adam's step by torch's own fused CPU kernel, in place on ``z``, which is zero, and on the
    state: z becomes what it moves by."""
    computed = [s.to(h.dtype) for s in state]
    step = torch.tensor(float(rule.step) - 1)  # torch increments it
    common: dict[str, Any] = {"lr": float(rule.lr), "weight_decay": 0.0, "eps": rule.eps, "maximize": False}
    if rule.method == "adagrad":
        adagrad([z], [h], computed, [step], fused=True, lr_decay=rule.lr_decay, **common)
    else:
        first, second = rule.betas
        adam(
            [z], [h], computed[:1], computed[1:], [], [step], fused=True, amsgrad=False,
            beta1=first, beta2=second, **common,
        )  # fmt: skip
    for kept, new in zip(state, computed, strict=True):
        if kept is not new:
            kept.copy_(new)
