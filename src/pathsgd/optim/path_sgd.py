"""Path-SGD: steepest descent in the geometry of paths (Algorithm 1 of the paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    _default_to_fused_or_foreach,
    _use_grad_for_differentiable,
)

from pathsgd.geometry.scales import Gamma, check_p
from pathsgd.geometry.sharing import Shared, check_shared
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example
from pathsgd.optim.kernels.choice import Choice, check_implementation
from pathsgd.optim.kernels.layer import Rule
from pathsgd.optim.kernels.plan import Plan, Ready
from pathsgd.optim.limit import check_limit
from pathsgd.optim.source import ScaleSource, source_and_params

Limit = Callable[[list[Tensor]], list[Tensor]]


class PathSGD(Optimizer):
    r"""Path-SGD, rescaling invariant, with momentum and decoupled weight decay.

    With :math:`\gamma` the scale of each weight (one forward and one backward pass over the weights) and
    :math:`h = g / \sqrt\gamma` the gradient in invariant coordinates:

    .. math::
        b_t &= \mu b_{t-1} + h_t \\
        w_t &= (1 - \eta \lambda) w_{t-1} - \eta\, b_t / \sqrt{\gamma}

    Without momentum that is the paper's :math:`w - \eta g / \gamma`. A network and its rescaled copy take
    the same steps: momentum lives on h, which a rescaling does not change, and decoupled decay at p = 2
    *is* path regularisation, :math:`\nabla \phi_2^2 / (2 \gamma_2) = w`.

    Args:
        model: the module to train; or its parameters in any form torch takes, with ``graph``.
        example_input: a tensor, a tuple of inputs or a dict of keyword inputs of the model; only shapes
            matter. May be left out: the model is then traced from the first batch it sees.
        lr: step size. 3e-3 works on the networks of ``benchmarks/learning_rate.py``; with momentum take 1e-3.
        p: the order of the path norm, 1 <= p <= inf.
        momentum: momentum factor, on h.
        nesterov: Nesterov momentum.
        weight_decay: decoupled weight decay.
        graph: the graph of the model, if it was traced before.
        max_relative_step: no unit's incoming weights move by more than this fraction of themselves, both
            measured in invariant coordinates (default: no limit). It tames near-dead paths.
        shared: how often a path counts that uses a weight k times, as in recurrent and tied layers:
            ``"kappa1"`` k times, ``"gram"`` k^2, ``"hessian"`` k (2k - 1). The last two need a pass over
            the network for each entry of such a weight.
        refresh_every: gamma is measured every so many steps.
        fallback_lr: the step size of parameters that are not path-normalised (default: ``lr``). It follows
            the schedule of ``lr``.
        batch_dim: the batch axis of the inputs, see :func:`pathsgd.trace`.
        implementation: how stacks of linear layers are moved. ``"auto"`` takes ``"triton"`` on a GPU,
            ``"compiled"`` on a CPU with a C compiler and ``"blocked"`` on one without; what they do not fit,
            and everything else, is for the ``"reference"``. They compute the same.
        maximize, foreach, differentiable: as in torch.optim. ``foreach`` chooses a form of the reference.

    Parameters that are on no path, or alone on theirs, have gamma = 1: for them this is SGD.
    ``print(optimizer.graph)`` says which and why.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> optimizer = PathSGD(model, lr=0.01)
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        example_input: Example | PathGraph | None = None,
        lr: float | Tensor = 3e-3,
        *,
        p: float = 2,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        graph: PathGraph | None = None,
        max_relative_step: float | None = None,
        shared: Shared = "kappa1",
        refresh_every: int = 1,
        fallback_lr: float | None = None,
        batch_dim: int | None = 0,
        implementation: Choice = "auto",
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if momentum < 0.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        if weight_decay < 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if nesterov and momentum <= 0:
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        if fallback_lr is not None and (fallback_lr < 0 or lr == 0):
            raise ValueError(f"Invalid fallback_lr value: {fallback_lr} (it follows lr, which must not be 0)")
        check_limit(max_relative_step)
        check_shared(shared, check_p(p))
        self.source, params = source_and_params(model, example_input, graph, batch_dim, refresh_every, shared)
        defaults = {
            "lr": lr,
            "p": p,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "fallback_scale": 1.0 if fallback_lr is None else fallback_lr / float(lr),
            "max_relative_step": max_relative_step,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
        }
        self.implementation = check_implementation(implementation)
        self._plan: Plan | None = None
        super().__init__(params, defaults)
        self.source.calibrate(p)

    source: ScaleSource
    implementation: Choice

    @property
    def graph(self) -> PathGraph:
        """What is path-normalised and what is not: ``print(optimizer.graph)``."""
        return self.source.traced()

    def refresh(self) -> None:
        """Measure gamma anew at the next step: after writes that torch does not count (``.data``, numpy) with
        ``refresh_every`` over 1."""
        self.source.refresh()
        if self._plan is not None:
            self._plan.forget()

    def __getstate__(self) -> dict[str, Any]:
        kept = {"source": self.source, "implementation": self.implementation}
        return {**super().__getstate__(), **kept, "_plan": None}

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Everything is looked at before anything is moved: an error leaves the weights as they were, and
        # gamma is that of the weights before the step.
        work = [(group, *self._by_kernel(group)) for group in self.param_groups]
        rest = [(group, self._collect(group, params)) for group, _, params in work]
        for group, chains, _ in work:
            for chain in chains:
                chain.step(_rule(group))
        for group, (params, grads, gammas, buffers) in rest:
            path_sgd(
                params,
                grads,
                gammas,
                buffers,
                lr=group["lr"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                weight_decay=group["weight_decay"],
                fallback_scale=group["fallback_scale"],
                limit=self._limit(group, params),
                maximize=group["maximize"],
                foreach=group["foreach"],
                differentiable=group["differentiable"],
            )
            if group["momentum"] != 0:
                for parameter, buffer in zip(params, buffers, strict=True):
                    self.state[parameter]["momentum_buffer"] = buffer
        self.source.stepped()
        return loss

    def _by_kernel(self, group: dict[str, Any]) -> tuple[list[Ready], list[Tensor]]:
        """The chains of a group that kernels move, and the parameters that are left for the reference."""
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in params:
            if parameter.grad.is_sparse:
                raise RuntimeError("PathSGD does not support sparse gradients")
            if parameter.is_complex():
                raise RuntimeError("PathSGD does not support complex parameters")
        plain = (
            group["foreach"] is None and not group["differentiable"] and group["max_relative_step"] is None
        )
        if not plain or not params or self.source.refresh_every > 1 or torch.compiler.is_compiling():
            return [], params
        self.source.check_identity()
        if self._plan is None:
            named = dict(self.source.model.named_parameters())
            self._plan = Plan(self.source.traced(), named, self.implementation)
        chains = self._plan.ready(
            params,
            self._momentum_of if group["momentum"] != 0 else lambda _: None,
            _rule(group),
            lambda: self.source.gammas(group["p"]),
        )
        moved = {id(parameter) for chain in chains for parameter in chain.parameters}
        return chains, [parameter for parameter in params if id(parameter) not in moved]

    def _momentum_of(self, parameter: Tensor) -> Tensor:
        """Kernels write their momentum in place, so it has to be there: zero before the first step."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            state["momentum_buffer"] = torch.zeros_like(
                parameter, dtype=dtype, memory_format=torch.contiguous_format
            )
        return state["momentum_buffer"]

    def _limit(self, group: dict[str, Any], params: list[Tensor]) -> Limit | None:
        bound = group["max_relative_step"]
        if bound is None:
            return None
        return lambda steps: self.source.limited(params, steps, group["p"], bound)

    def _collect(
        self, group: dict[str, Any], params: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Gamma | None], list[Tensor | None]]:
        """Parameters with their gradients, gammas and momentum."""
        grads = [parameter.grad for parameter in params if parameter.grad is not None]
        gammas = self.source.gammas_of(params, group["p"])
        buffers: list[Tensor | None] = [None] * len(params)
        if group["momentum"] != 0:
            buffers = [self.state[parameter].get("momentum_buffer") for parameter in params]
        return params, grads, gammas, buffers


def _rule(group: dict[str, Any]) -> Rule:
    names = ("lr", "momentum", "nesterov", "weight_decay", "maximize", "p")
    return Rule(**{name: group[name] for name in names})


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
    limit: Limit | None = None,
    maximize: bool = False,
    foreach: bool | None = None,
    differentiable: bool = False,
) -> None:
    """Functional API that performs the Path-SGD update in place; see :class:`PathSGD`.

    ``gammas[k] is None`` means gamma = 1. New momentum buffers are written into ``momentum_buffers``.
    ``limit`` shortens the steps while they are in invariant coordinates.
    """
    if foreach is None:
        _, foreach = _default_to_fused_or_foreach(params, differentiable, use_fused=False)
    update = _multi_tensor_path_sgd if foreach else _single_tensor_path_sgd
    update(
        params,
        grads,
        gammas,
        momentum_buffers,
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        fallback_scale=fallback_scale,
        limit=limit,
        maximize=maximize,
    )


def _single_tensor_path_sgd(
    params: list[Tensor],
    grads: list[Tensor],
    gammas: list[Gamma | None],
    momentum_buffers: list[Tensor | None],
    *,
    lr: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    fallback_scale: float,
    limit: Limit | None,
    maximize: bool,
) -> None:
    hs = []
    for k, gamma in enumerate(gammas):
        h = _invariant(grads[k], gamma, maximize)
        if momentum != 0:
            buffer = momentum_buffers[k]
            buffer = h.clone() if buffer is None else buffer.mul_(momentum).add_(h)
            momentum_buffers[k] = buffer
            h = h.add(buffer, alpha=momentum) if nesterov else buffer
        hs.append((lr if gamma is not None else lr * fallback_scale) * h)
    if limit is not None:
        hs = limit(hs)
    for param, gamma, h in zip(params, gammas, hs, strict=True):
        if weight_decay != 0:
            rate = lr if gamma is not None else lr * fallback_scale
            param.mul_(1 - rate * weight_decay)
        step = h if gamma is None else gamma.divide(h)
        param.sub_(step.to(param.dtype))


def _multi_tensor_path_sgd(
    params: list[Tensor],
    grads: list[Tensor],
    gammas: list[Gamma | None],
    momentum_buffers: list[Tensor | None],
    *,
    lr: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    fallback_scale: float,
    limit: Limit | None,
    maximize: bool,
) -> None:
    if not params:
        return
    hs = [_invariant(grad, gamma, maximize) for grad, gamma in zip(grads, gammas, strict=True)]
    if momentum != 0:
        for k, h in enumerate(hs):
            if momentum_buffers[k] is None:
                momentum_buffers[k] = torch.zeros_like(h)
        buffers = [buffer for buffer in momentum_buffers if buffer is not None]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, hs)
        hs = list(torch._foreach_add(hs, buffers, alpha=momentum)) if nesterov else buffers
    rates = [lr if gamma is not None else lr * fallback_scale for gamma in gammas]
    hs = [rate * h for rate, h in zip(rates, hs, strict=True)]
    if limit is not None:
        hs = limit(hs)
    if weight_decay != 0:
        for param, rate in zip(params, rates, strict=True):
            param.mul_(1 - rate * weight_decay)
    steps = [h if gamma is None else gamma.divide(h) for h, gamma in zip(hs, gammas, strict=True)]
    torch._foreach_sub_(params, [step.to(param.dtype) for step, param in zip(steps, params, strict=True)])


def _invariant(grad: Tensor, gamma: Gamma | None, maximize: bool) -> Tensor:
    """``h = g / sqrt(gamma)``, the gradient in the coordinates a rescaling does not change."""
    grad = -grad if maximize else grad
    if gamma is None:
        return grad
    return gamma.divide(grad.to(gamma.arithmetic.dtype))
