"""Path-SGD: steepest descent in the geometry of paths (Algorithm 1 of the paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, _use_grad_for_differentiable

from pathsgd.geometry.gamma import Gamma, check_p
from pathsgd.geometry.shared_weights import Shared, check_shared
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example
from pathsgd.optim.fused.choice import Choice, check_implementation
from pathsgd.optim.fused.dispatch import Plan, Ready
from pathsgd.optim.gamma_cache import GammaCache, source_and_params
from pathsgd.optim.rule import Rule, State
from pathsgd.optim.step_limit import check_limit
from pathsgd.optim.update import by_foreach, invariant_steps, move, rates_of


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
        check_shared(shared, check_p(p))
        self.source, params = source_and_params(model, example_input, graph, batch_dim, refresh_every, shared)
        defaults = {
            "lr": lr,
            "p": p,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "fallback_lr": fallback_lr,
            "fallback_scale": 1.0,
            "max_relative_step": max_relative_step,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
        }
        self.implementation = check_implementation(implementation)
        self._plan: Plan | None = None
        super().__init__(params, defaults)
        self.source.check_known(self.param_groups)
        self.source.calibrate(p)

    source: GammaCache
    implementation: Choice

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; ``p``, ``max_relative_step`` and ``fallback_lr`` may be a group's own."""
        options = {**self.defaults, **param_group}
        check_p(options["p"])
        check_limit(options["max_relative_step"])
        rate, lr = options["fallback_lr"], float(options["lr"])
        if rate is not None:
            if rate < 0 or lr == 0:
                raise ValueError(f"Invalid fallback_lr value: {rate} (it follows lr, which must not be 0)")
            # A ratio, so that a schedule of lr acts on both.
            param_group["fallback_scale"] = rate / lr
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Any) -> None:
        """As in torch.optim, but momentum keeps its precision: torch would round it to the parameter's."""
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            kept = state_dict["state"].get(number, {}).get("momentum_buffer")
            if kept is not None and kept.dtype != parameter.dtype:
                self.state[parameter]["momentum_buffer"] = kept.detach().clone().to(parameter.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of a state that was saved before an option was there
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @property
    def graph(self) -> PathGraph:
        """What is path-normalised and what is not: ``print(optimizer.graph)``."""
        return self.source.traced()

    def refresh(self) -> None:
        """Measure gamma anew at the next step: after writes that torch does not count (``.data``)."""
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
        params = [self._checked(group) for group in self.param_groups]
        chains = self._by_kernel(params)
        moved = {id(parameter) for chain in chains for parameter in chain.parameters}
        rest = self._limited(
            [
                self._collect(group, [p for p in own if id(p) not in moved])
                for group, own in zip(self.param_groups, params, strict=True)
            ]
        )
        for chain in chains:
            chain.step()
        for part in rest:
            move(
                part.params,
                part.gammas,
                part.steps,
                part.rates,
                weight_decay=part.decay,
                foreach=part.foreach,
            )
        self.source.stepped()
        return loss

    def _checked(self, group: dict[str, Any]) -> list[Tensor]:
        """The parameters of a group that have a gradient."""
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in params:
            if parameter.grad.is_sparse:
                raise RuntimeError("PathSGD does not support sparse gradients")
            if parameter.is_complex():
                raise RuntimeError("PathSGD does not support complex parameters")
        return params

    def _by_kernel(self, params: list[list[Tensor]]) -> list[Ready]:
        """The chains that kernels move, of these parameters of each group."""
        rules: dict[int, Rule] = {}
        for group, own in zip(self.param_groups, params, strict=True):
            if (
                group["foreach"] is None
                and not group["differentiable"]
                and group["max_relative_step"] is None
            ):
                rules.update(dict.fromkeys(map(id, own), _rule(group)))
        if not rules or self.source.refresh_every > 1 or torch.compiler.is_compiling():
            return []
        self.source.check_identity()
        if self._plan is None:
            self._plan = Plan(self.source.traced(), self.source.model, self.implementation)
        return self._plan.ready(rules, self._state_of, self.source.gammas)

    def _state_of(self, parameter: Tensor) -> State:
        """Kernels write their momentum in place, so it has to be there: zero before the first step."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            state["momentum_buffer"] = torch.zeros_like(
                parameter, dtype=dtype, memory_format=torch.contiguous_format
            )
        return (state["momentum_buffer"],)

    def _collect(self, group: dict[str, Any], params: list[Tensor]) -> _Part:
        """A group's parameters with their steps in invariant coordinates."""
        grads = [parameter.grad for parameter in params if parameter.grad is not None]
        gammas = self.source.gammas_of(params, group["p"])
        foreach = group["foreach"]
        if foreach is None:
            foreach = by_foreach(params, group["differentiable"])
        rates = rates_of(gammas, group["lr"], group["fallback_scale"])
        buffers: list[Tensor | None] = [None] * len(params)
        if group["momentum"] != 0:
            buffers = [self.state[parameter].get("momentum_buffer") for parameter in params]
        steps = invariant_steps(
            grads, gammas, buffers, rates,
            momentum=group["momentum"], nesterov=group["nesterov"], maximize=group["maximize"],
            foreach=foreach,
        )  # fmt: skip
        if group["momentum"] != 0:
            for parameter, buffer in zip(params, buffers, strict=True):
                self.state[parameter]["momentum_buffer"] = buffer
        decay = group["weight_decay"]
        bound = group["max_relative_step"]
        if bound is not None and decay != 0:  # a limit is on all that moves a unit
            weights = [
                p if g is None else g.weight_to_z(p.to(g.arithmetic.dtype))
                for p, g in zip(params, gammas, strict=True)
            ]
            steps = [step + rate * decay * w for step, rate, w in zip(steps, rates, weights, strict=True)]
            decay = 0.0
        return _Part(params, gammas, steps, rates, decay, foreach, group["p"], bound)

    def _limited(self, parts: list[_Part]) -> list[_Part]:
        """The same with steps that no unit finds too long, whichever groups they come from."""
        for p in {part.p for part in parts if part.bound is not None}:
            own = [part for part in parts if part.p == p]
            params = [parameter for part in own for parameter in part.params]
            steps = [step for part in own for step in part.steps]
            bounds = [part.bound for part in own for _ in part.params]
            short = iter(self.source.limited(self.source.gammas(p), params, params, steps, bounds, p))
            for part in own:
                part.steps = [next(short) for _ in part.steps]
        return parts


@dataclass
class _Part:
    """What the reference moves of one group."""

    params: list[Tensor]
    gammas: list[Gamma | None]
    steps: list[Tensor]
    rates: list[float | Tensor]
    decay: float
    foreach: bool
    p: float
    bound: float | None


def _rule(group: dict[str, Any]) -> Rule:
    names = ("lr", "momentum", "nesterov", "weight_decay", "maximize", "p")
    return Rule(**{name: group[name] for name in names})
