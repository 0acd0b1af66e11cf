"""torch's own SGD, Adagrad and Adam(W) as rules of the fused implementations.

State has torch's names, shapes and devices, so one step may be fused and the next one torch's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.optimizer import Optimizer

from pathsgd import _torch
from pathsgd.geometry.sharded import local_part
from pathsgd.optim.rule import Decay, Rule, State

STATES: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum_buffer",),
    Adagrad: ("sum",),
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
}
"""What is kept for a parameter. A subclass may do anything, so only these very classes count."""


def rule_of(optimizer: Optimizer, group: dict[str, Any], p: float) -> Rule | None:
    """What steps of this optimizer do to a group's parameters; None if there is no rule for it."""
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
    if isinstance(optimizer, Adagrad):
        return Rule(method="adagrad", eps=group["eps"], lr_decay=group["lr_decay"], decay="coupled", **common)
    betas = group["betas"]
    if group["amsgrad"] or any(isinstance(beta, Tensor) for beta in betas):
        return None
    decoupled = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay", False)
    return Rule(
        method="adam", betas=betas, eps=group["eps"], decay="live" if decoupled else "coupled", **common
    )


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


class TorchState:
    """See :class:`pathsgd.optim.fused.implementation.OptimizerState`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.state, self.names = optimizer.state, STATES.get(type(optimizer), ())

    def tensors(self, parameter: Tensor) -> State:
        own = self.state[parameter]
        return tuple([own[name] for name in self.names])

    def count(self, parameter: Tensor) -> Tensor:
        """Moved to its device, where kernels read it; not into a graph that is being captured."""
        own = self.state[parameter]
        if own["step"].device != parameter.device and not _torch.is_capturing():
            own["step"] = own["step"].to(parameter.device)
        return own["step"]

    def count_next(self, rule: Rule, parameters: Sequence[Tensor]) -> list[Rule]:
        if rule.method == "sgd":
            return [rule for _ in parameters]
        counts = [self.state[parameter]["step"] for parameter in parameters]
        # On a GPU the tensor itself is incremented before the kernels read it, see count_step.
        steps = [count.item() + 1 if count.is_cpu else count for count in counts]
        made = {step: replace(rule, step=step) for step in {*steps}}
        return [made[step] for step in steps]


def count_step(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """One step more for each of these."""
    steps = [optimizer.state[parameter]["step"] for parameter in parameters if not isinstance(optimizer, SGD)]
    if steps and all(step.is_cpu for step in steps):
        # A number would be made a tensor for each of them.
        _torch.foreach("add_", steps, torch.ones((), device="cpu"), alpha=1)
    elif steps:
        _torch.foreach("add_", steps, 1)


def step_from_zero_(zs: list[Tensor], hs: list[Tensor], states: Sequence[list[Tensor]], rule: Rule) -> None:
    """AdaGrad's or Adam's step by torch's own fused CPU kernel, in place on ``zs``, which are zero, and on
    their states, a list of each kind: z becomes what it moves by."""
    dtype = hs[0].dtype
    computed = [[s if s.dtype == dtype else s.to(dtype) for s in own] for own in states]
    steps = [torch.full((), float(rule.step), dtype=torch.float32, device="cpu")] * len(zs)
    common: dict[str, Any] = {"lr": float(rule.lr), "weight_decay": 0.0, "eps": rule.eps, "maximize": False}
    if rule.method == "adagrad":
        _torch.fused_adagrad(zs, hs, *computed, steps, lr_decay=rule.lr_decay, **common)
    else:
        first, second = rule.betas
        _torch.fused_adam(zs, hs, *computed, [], steps, beta1=first, beta2=second, amsgrad=False, **common)
    for own, new in zip(states, computed, strict=True):
        for kept, found in zip(own, new, strict=True):
            if kept is not found:
                kept.copy_(found)


@contextmanager
def use_fused_kernel(optimizer: Optimizer) -> Iterator[None]:
    """Inside, Adam on a CPU takes torch's fused kernel, in a third of the time, unless it was told what to
    take."""
    chosen = []
    if type(optimizer) in (Adam, AdamW) and not _torch.is_compiling():
        chosen = [group for group in optimizer.param_groups if _takes_fused(group, optimizer)]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def _takes_fused(group: dict[str, Any], optimizer: Optimizer) -> bool:
    told = any(group[name] is not None for name in ("fused", "foreach"))
    if told or group["differentiable"] or group["capturable"]:
        return False
    return all(can_be_fused(p, optimizer.state.get(p, {})) for p in group["params"] if p.grad is not None)


def can_be_fused(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Whether torch's fused kernel can move a parameter on a CPU. It takes for granted that all tensors lie
    in memory in the same order, and is wrong without a word if they do not."""
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    tensors = [parameter, parameter.grad, *(state[name] for name in names if name in state)]
    dtype = parameter.dtype
    return (
        parameter.device.type == "cpu"
        and dtype.is_floating_point
        and all(t.dtype is dtype and local_part(t).is_contiguous() for t in tensors)
        and ("step" not in state or state["step"].dtype is torch.float32)
    )
