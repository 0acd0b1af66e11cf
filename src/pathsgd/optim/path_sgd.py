"""Path-SGD: steepest descent in the geometry of paths (Algorithm 1 of the paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd._torch import defaults_to_foreach, is_compiling, use_grad_for_differentiable
from pathsgd.geometry.gamma import Gamma, check_p, take_roots
from pathsgd.geometry.sharded import local_part, place_gradients
from pathsgd.geometry.shared_weights import Shared
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example
from pathsgd.optim.fused.dispatch import Choice, Ready
from pathsgd.optim.path_optimizer import PathOptimizer
from pathsgd.optim.relative.coordinates import Coordinates
from pathsgd.optim.relative.growth import KEY as GROWTH
from pathsgd.optim.relative.sgd import step_normalised
from pathsgd.optim.relative.steps import RelativeSteps
from pathsgd.optim.relative.unit_scales import KEY as UNIT_SCALES
from pathsgd.optim.rule import (
    Each,
    GroupRule,
    Rate,
    Rule,
    State,
    apply_momentum,
    apply_steps,
    gradients_to_z,
    multi_tensor,
    single_tensor,
)
from pathsgd.optim.step_limit import StepLimit, check_limit

RULE = ("lr", "momentum", "nesterov", "weight_decay", "maximize", "p")
"""The options of a group that are numbers of its rule."""


class PathSGD(PathOptimizer):
    """Path-SGD, rescaling invariant, with momentum and decoupled weight decay.

    With gamma the path scale of each weight (one forward and one backward pass over the weights) and h the
    gradient in invariant coordinates, a step is

        h = g / sqrt(gamma)
        b = momentum * b + h
        w = (1 - lr * weight_decay) * w - lr * b / sqrt(gamma)

    Without momentum that is the paper's ``w - lr * g / gamma``. A network and its rescaled copy take the same
    steps: momentum lives on h, which a rescaling does not change, and decoupled decay at p = 2 *is* path
    regularisation: the gradient of ``phi_2^2 / 2``, divided by gamma, is w.

    For parameters that are on no path, or alone on theirs, gamma = 1 is taken: for them this is SGD.
    ``print(optimizer.graph)`` says which and why. If that is most of the model, a warning says so.

    Args:
        model: the module to train; or its parameters in any form torch takes, with ``graph``.
        example_input: a tensor, a tuple of inputs or a dict of keyword inputs of the model; only shapes
            matter. May be left out: the model is then traced from the first batch it sees.
        lr: step size, by default 3e-3, which works on an MLP for MNIST and a small ResNet for CIFAR-10; with
            momentum take 1e-3. Relative steps have 0.02.
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
        refresh_every: gamma is measured every so many steps, and after the training was resumed.
        fallback_lr: the step size of parameters that are not path-normalised (default: ``lr``). It follows
            the schedule of ``lr``.
        batch_dim: the batch axis of the inputs, see :func:`pathsgd.trace`.
        implementation: how parameters are moved: by ``"triton"`` on a GPU, by ``"blocked"`` on a CPU, or by
            ``"reference"``, which also moves what those do not. ``"auto"`` chooses; they compute the same.
        maximize: maximize the objective instead of minimizing it.
        relative: whether steps are relative, as in :class:`pathsgd.PathNormalized`, in the direction of the
            normalised momentum.
        coordinates: as in :class:`pathsgd.PathNormalized`.
        growth: as in :class:`pathsgd.PathNormalized`.
        foreach: whether the reference uses torch's multi-tensor kernels (default: as torch.optim does).
        differentiable: whether the step is recorded by autograd, gamma held fixed.

    Raises:
        ValueError: an option is out of its range.
        TypeError: parameters were passed without the graph of their model.
        TraceError: the model cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = PathSGD(model, lr=0.01)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    runs_on_device = True
    """So that a relative step can be captured in a CUDA graph."""

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        example_input: Example | PathGraph | None = None,
        lr: float | Tensor | None = None,
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
        relative: bool = False,
        coordinates: Coordinates = "paths",
        growth: float = 1.0,
        foreach: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        if lr is None:
            lr = 0.02 if relative else 3e-3
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
        if relative and (max_relative_step is not None or fallback_lr is not None or differentiable):
            raise ValueError("relative steps take no max_relative_step, fallback_lr or differentiable")
        self._needs_paths = not relative
        params = self._connect(
            model, example_input, p=p, graph=graph, batch_dim=batch_dim, refresh_every=refresh_every,
            shared=shared, implementation=implementation,
        )  # fmt: skip
        self._check_sharded(max_relative_step=max_relative_step, differentiable=differentiable)
        defaults = {
            "lr": lr,
            "p": p,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "fallback_lr": fallback_lr,
            "fallback_ratio": 1.0,
            "max_relative_step": max_relative_step,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
        }
        super().__init__(params, defaults)
        self._step_limit = StepLimit(self.gamma_cache)
        self.relative = relative
        self._relative = RelativeSteps(self.gamma_cache, p, coordinates, growth, implementation)
        self.gamma_cache.known.check_groups(self.param_groups)
        if not relative:
            self.gamma_cache.calibrate(p)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch.optim; ``p``, ``max_relative_step`` and ``fallback_lr`` may be its own.

        Args:
            param_group: the parameters and their options.

        Raises:
            ValueError: an option is out of its range.
        """
        options = {**self.defaults, **param_group}
        check_p(options["p"])
        check_limit(options["max_relative_step"])
        self._check_sharded(
            max_relative_step=options["max_relative_step"], differentiable=options["differentiable"]
        )
        rate, lr = options["fallback_lr"], float(options["lr"])
        if rate is not None:
            if rate < 0 or lr == 0:
                raise ValueError(f"Invalid fallback_lr value: {rate} (it follows lr, which must not be 0)")
            # A ratio, so that a schedule of lr acts on both.
            param_group["fallback_ratio"] = rate / lr
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Any) -> None:
        """As in torch.optim, but state keeps its precision: torch would round it to the parameter's.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        super().load_state_dict(state_dict)
        self._restore_precision(state_dict, ("momentum_buffer", GROWTH, UNIT_SCALES))

    def __getstate__(self) -> dict[str, Any]:
        kept = {
            name: getattr(self, name)
            for name in ("gamma_cache", "implementation", "_step_limit", "relative", "_relative")
        }
        return {**super().__getstate__(), **kept, "_dispatch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of a state saved before an option was there
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The loss, if there is a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients_arrive()
        if self.relative:
            self._relative.step(self, None, self._step_normalised)
            return loss
        # Everything is computed before anything is written: an error leaves the weights as they were, and
        # gamma is that of the weights before the step.
        self.gamma_cache.before_step()
        params = [self._check_gradients(group) for group in self.param_groups]
        ready = self._by_fused(params)
        fused = {id(parameter) for part in ready for parameter in part.parameters}
        parts = []
        for group, own in zip(self.param_groups, params, strict=True):
            rest = [p for p in own if id(p) not in fused]
            if rest:
                parts.append(self._compute_steps(group, rest))
        self._limit_steps(parts)
        for fused_part in ready:
            fused_part.step()
        for part in parts:
            apply_steps(part.params, part.us, part.gammas, part.rates, part.weight_decay, part.each)
        self.gamma_cache.after_step()
        return loss

    def _step_normalised(self, _: object) -> None:
        for group in self.param_groups:
            step_normalised(group, self._momentum_buffer, self._relative.blocks_of)

    def _check_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        """The parameters of a group that have a gradient."""
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        if self.gamma_cache.sharded:
            place_gradients(params)
        if any(parameter.grad.is_sparse for parameter in params):
            raise RuntimeError("PathSGD does not support sparse gradients")
        if any(parameter.is_complex() for parameter in params):
            raise RuntimeError("PathSGD does not support complex parameters")
        return params

    def _by_fused(self, params: list[list[Tensor]]) -> list[Ready]:
        """What fused implementations move, of these parameters of each group."""
        # A limit looks at the steps of all groups together.
        if is_compiling() or any(group["max_relative_step"] is not None for group in self.param_groups):
            return []
        groups = []
        for group, own in zip(self.param_groups, params, strict=True):
            if own and group["foreach"] is None and not group["differentiable"]:
                rule = Rule(**{name: group[name] for name in RULE})
                ratio = group["fallback_ratio"]
                if ratio == 1:
                    groups.append(GroupRule(rule, own))
                    continue
                known = [self.gamma_cache.is_normalised(p) for p in own]
                groups += [
                    GroupRule(
                        replace(rule, lr=lr), [p for p, k in zip(own, known, strict=True) if k == inside]
                    )
                    for inside, lr in ((True, rule.lr), (False, rule.lr * ratio))
                    if inside in known
                ]
        return self._find_ready(groups, _MomentumState(self._momentum_buffer))

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            # Kernels read that of a convolution in the order of its weight, and that of a matrix by rows.
            layout = torch.preserve_format if parameter.dim() > 2 else torch.contiguous_format
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype, memory_format=layout)
        return state["momentum_buffer"]

    def _compute_steps(self, group: dict[str, Any], params: list[Tensor]) -> _Part:
        """The steps of a group's parameters in invariant coordinates."""
        gammas = self.gamma_cache.gammas_of(params, group["p"])
        buffers = [self._momentum_buffer(parameter) for parameter in params] if group["momentum"] else []
        grads = [local_part(parameter.grad) for parameter in params if parameter.grad is not None]
        params, buffers = [*map(local_part, params)], [*map(local_part, buffers)]
        foreach = group["foreach"]
        if foreach is None:
            foreach = defaults_to_foreach(params, group["differentiable"])
        if foreach:
            take_roots(gamma for gamma in gammas if gamma is not None)
        each = multi_tensor if foreach else single_tensor
        hs = gradients_to_z([-grad for grad in grads] if group["maximize"] else grads, gammas, each)
        us, _ = apply_momentum(hs, buffers, group["momentum"], group["nesterov"], each)
        lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
        rates = [lr if gamma is not None else lr * group["fallback_ratio"] for gamma in gammas]
        return _Part(
            params, gammas, us, rates, group["weight_decay"], each, group["p"], group["max_relative_step"]
        )

    def _limit_steps(self, parts: list[_Part]) -> None:
        """Shortens the steps of units that would move too far, over all groups together."""
        for p in {part.p for part in parts if part.bound is not None}:
            own = [part for part in parts if part.p == p]
            params = [parameter for part in own for parameter in part.params]
            bounds = [part.bound for part in own for _ in part.params]
            for part in own:
                part.include_decay()
            steps = [rate * u for part in own for rate, u in zip(part.rates, part.us, strict=True)]
            factors = iter(self._step_limit.find(params, params, steps, bounds, p))
            for part in own:
                for k, (u, factor) in enumerate(zip(part.us, factors, strict=False)):
                    part.us[k] = u if factor is None else u * factor


@dataclass(frozen=True)
class _MomentumState:
    """See :class:`pathsgd.optim.fused.implementation.OptimizerState`."""

    buffer: Callable[[Tensor], Tensor]

    def tensors(self, parameter: Tensor) -> State:
        return (self.buffer(parameter),)

    def count(self, parameter: Tensor) -> Tensor:
        raise NotImplementedError  # no step depends on its number

    def count_next(self, rule: Rule, parameters: Sequence[Tensor]) -> list[Rule]:
        return [rule for _ in parameters]


@dataclass
class _Part:
    """What the reference moves of one group."""

    params: list[Tensor]
    gammas: list[Gamma | None]
    us: list[Tensor]
    rates: list[Rate]
    weight_decay: float
    each: Each
    p: float
    bound: float | None

    def include_decay(self) -> None:
        """Makes the decay a part of u where steps are limited: a limit is on all that moves a unit."""
        if self.bound is None or not self.weight_decay:
            return
        for k, (w, gamma) in enumerate(zip(self.params, self.gammas, strict=True)):
            z = w if gamma is None else gamma.weight_to_z(w.to(gamma.dtype))
            self.us[k] = self.us[k] + self.weight_decay * z
        self.weight_decay = 0.0
