"""Any torch optimizer made rescaling invariant.

The base optimizer works in the coordinates ``z = w sqrt(gamma)``, which a rescaling does not change, on
their gradient ``h = g / sqrt(gamma)``; its step is mapped back, ``w += (z' - z) / sqrt(gamma)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from pathsgd._torch import defaults_to_foreach, has_step_hooks, load_state_dict_hooks
from pathsgd.geometry.gamma import take_roots
from pathsgd.geometry.sharded import local_part
from pathsgd.geometry.shared_weights import Shared
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.sharded import is_sharded
from pathsgd.graph.trace import Example
from pathsgd.optim.coordinates import InvariantView, Limit
from pathsgd.optim.fused import torch_rules
from pathsgd.optim.fused.dispatch import Choice, Ready
from pathsgd.optim.path_optimizer import PathOptimizer
from pathsgd.optim.relative.coordinates import Coordinates
from pathsgd.optim.relative.default_rate import DefaultRate
from pathsgd.optim.relative.growth import KEY as GROWTH
from pathsgd.optim.relative.spectral import KEY as SPECTRAL
from pathsgd.optim.relative.steps import RelativeSteps
from pathsgd.optim.relative.unit_scales import KEY as UNIT_SCALES
from pathsgd.optim.rule import GroupRule
from pathsgd.optim.step_limit import StepLimit, check_limit


class PathNormalized(PathOptimizer):
    """A torch optimizer in the geometry of paths: the same options, state, groups and schedules.

    State is kept on h and z, so it survives a rescaling of the model in mid-training. What a base optimizer
    does not take (Muon: anything but matrices) it does not take here either.

    Under torch's SGD, Adagrad, Adam and AdamW parameters are moved by fused implementations, with no copies.
    What they have no rule for is taken to z and back around the base's own step, during which two copies of
    those parameters are held, and none between steps: other optimizers, layers in low precision that are not
    in a stack of linear ones, ``dampening``, ``amsgrad``, ``differentiable``, ``max_relative_step`` and
    closures.

    With ``relative=True`` a step is a fraction of what it moves: the base works on ``u = z / size``,
    z being the weights of the canonical equivalent (:mod:`pathsgd.geometry.canonical`) and ``size`` the root
    mean square of each matrix, kernel or vector; then every matrix and kernel is brought back to the norm it
    had, so that it turns, and its norm grows at a rate of its own. What falls back takes the same steps on
    the weights themselves. With a base that normalises its direction, as Adam does, a learning rate is then
    an angle; with torch's own of these the steps of matrices have the spectral norms of
    :class:`pathsgd.PathAdam`.

    Args:
        optimizer_class: any torch optimizer, of torch or not, LBFGS with its closure included.
        model: the module to train; or its parameters in any form torch takes, with ``graph``.
        example_input: a tensor, a tuple of inputs or a dict of keyword inputs of the model; only shapes
            matter. May be left out: the model is then traced from the first batch it sees.
        p: the order of the path norm, 1 <= p <= inf.
        graph: the graph of the model, if it was traced before.
        max_relative_step: as in :class:`pathsgd.PathSGD`.
        shared: as in :class:`pathsgd.PathSGD`.
        refresh_every: gamma is measured every so many steps, and after the training was resumed.
        batch_dim: the batch axis of the inputs, see :func:`pathsgd.trace`.
        implementation: as in :class:`pathsgd.PathSGD`.
        relative: whether steps are relative.
        coordinates: of relative steps: ``"paths"``, which a rescaling does not change, or ``"weights"``,
            which is the same form without them.
        growth: of relative steps: how fast the scale of a region may grow, in units of ``lr``. 0 keeps all
            norms.
        fallback: a second optimizer class for the parameters that are not path-normalised. It takes plain
            steps on the weights, at ``fallback_lr``. Needs ``example_input`` or ``graph``.
        fallback_lr: the step size of these parameters; without ``fallback`` as a group of the same optimizer.
        **options: what the base optimizer takes. In relative steps ``weight_decay`` shrinks the norms of
            matrices and kernels, decoupled.

    Raises:
        TypeError: the class of the optimizer does not come first, or parameters were passed without the
            graph of their model.
        ValueError: an option is out of its range.
        TraceError: the model cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = PathNormalized(torch.optim.AdamW, model, lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    base: Optimizer

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        model: nn.Module | Iterable[Any],
        example_input: Example | PathGraph | None = None,
        *,
        p: float = 2,
        graph: PathGraph | None = None,
        max_relative_step: float | None = None,
        shared: Shared = "kappa1",
        refresh_every: int = 1,
        batch_dim: int | None = 0,
        implementation: Choice = "auto",
        relative: bool = False,
        coordinates: Coordinates = "paths",
        growth: float = 1.0,
        fallback: Callable[..., Optimizer] | None = None,
        fallback_lr: float | None = None,
        **options: Any,
    ) -> None:
        if isinstance(optimizer_class, (Optimizer, nn.Module)) or not callable(optimizer_class):
            raise TypeError(
                "pass the class of the optimizer first, then the model and the optimizer's own options: "
                "PathNormalized(torch.optim.AdamW, model, example_input, lr=1e-4)"
            )
        check_limit(max_relative_step)
        if relative and max_relative_step is not None:
            raise ValueError("max_relative_step is for plain steps: relative ones are limited by lr already")
        self._needs_paths = not relative
        params = self._connect(
            model, example_input, p=p, graph=graph, batch_dim=batch_dim, refresh_every=refresh_every,
            shared=shared, implementation=implementation,
        )  # fmt: skip
        self._check_sharded(max_relative_step=max_relative_step)
        self.fallback: Optimizer | None = None
        if fallback is not None or fallback_lr is not None:
            params, fallen = self._split(params)
            rate = {} if fallback_lr is None else {"lr": fallback_lr}
            if fallen and fallback is not None:
                self.fallback = fallback(fallen, **rate)
            elif fallen:
                grouped = bool(params) and isinstance(params[0], dict)
                params = [*(params if grouped else [{"params": params}]), {"params": fallen, **rate}]
        self.relative = relative
        self._relative = RelativeSteps(self.gamma_cache, p, coordinates, growth, implementation)
        base = optimizer_class(params, **options)
        _take_together(base)
        self.gamma_cache.known.check_groups(base.param_groups)
        for group in base.param_groups:
            _check_group(group)
        self._share(base)
        super().__init__(self.param_groups, base.defaults)
        self.base, self.p, self.max_relative_step = base, p, max_relative_step
        self._step_limit = StepLimit(self.gamma_cache)
        self._default_rate: DefaultRate | None = None
        self._share(base)

    def _lower_rate(self) -> None:
        """Has the rate fall where there is no schedule."""
        self._default_rate = DefaultRate(self.base.param_groups)

    def _split(self, params: Iterable[Any]) -> tuple[list[Any], list[Tensor]]:
        """The parameters with paths, in the form they came in, and those that fall back."""
        if self.gamma_cache.lazy_graph.graph is None:
            raise TypeError(
                "fallback needs to know which parameters fall back: pass example_input, or graph=trace(...)"
            )
        infos, names = self.graph.parameters, self.gamma_cache.names
        kept: list[Any] = []
        fallen: list[Tensor] = []
        for entry in params:
            group = entry if isinstance(entry, dict) else {"params": [entry]}
            own = group["params"]
            own = [own] if isinstance(own, Tensor) else list(own)
            inside = [p for p in own if id(p) in names and infos[names[id(p)]].normalised]
            fallen += [p for p in own if not any(p is q for q in inside)]
            if inside:
                kept += [{**group, "params": inside}] if isinstance(entry, dict) else inside
        return kept, fallen

    def _share(self, base: Optimizer) -> None:
        """Groups, state and defaults are those of the base (and of the second optimizer), so that schedulers
        and state_dict see them."""
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        if self.fallback is not None:
            base.state.update(self.fallback.state)
            self.fallback.state = base.state
            self.param_groups = base.param_groups + self.fallback.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer.

        Args:
            param_group: the parameters and their options.
        """
        # Optimizer.__init__ calls this for groups which the base already holds.
        if hasattr(self, "base"):
            _check_group(param_group)
            self.base.add_param_group(param_group)
            self._share(self.base)

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the state of the base optimizer.

        Args:
            state_dict: what :meth:`state_dict` returned, here or of the plain base optimizer.
        """
        before, after = load_state_dict_hooks(self)
        for hook in before:
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        count = len(self.base.param_groups)
        groups = state_dict["param_groups"]
        self.base.load_state_dict({**state_dict, "param_groups": groups[:count]})
        if self.fallback is not None:
            self.fallback.load_state_dict({**state_dict, "param_groups": groups[count:]})
        self._share(self.base)
        if self._default_rate is not None:
            self._default_rate.resume(self.base.param_groups)
        self._restore_precision(state_dict, (GROWTH, SPECTRAL, UNIT_SCALES))
        for hook in after:
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "base", "fallback", "gamma_cache", "p", "max_relative_step", "implementation", "_step_limit",
            "relative", "_relative", "_default_rate",
        )  # fmt: skip
        return {**{name: getattr(self, name) for name in kept}, "_dispatch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share(self.base)
        super().__setstate__({})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs a single optimization step of the base optimizer in invariant coordinates.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The loss, if there is a closure.
        """
        if closure is None:
            self._check_gradients_arrive()
        if self._default_rate is not None:
            self._default_rate.before_step(self.base.param_groups)
        if self.relative:
            loss = self._relative.step(self.base, closure, self._step_base)
        else:
            loss = self._step(closure)
        if self.fallback is not None:
            self.fallback.step()
        if self._default_rate is not None:
            self._default_rate.after_step(self.base.param_groups)
        return loss

    def _step_base(self, closure: Callable[[], Any] | None) -> Any:
        with torch_rules.use_fused_kernel(self.base):
            return self.base.step() if closure is None else self.base.step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """The plain step."""
        self.gamma_cache.before_step()
        params = [p for group in self.base.param_groups for p in group["params"]]
        ready: list[Ready] = []
        if closure is None:
            params = [p for p in params if p.grad is not None]
            ready = [] if has_step_hooks(self.base) else self._by_fused()  # which may look at anything
        fused = {id(p) for part in ready for p in part.parameters}
        rest = [p for p in params if id(p) not in fused]
        loss = None
        if rest or not ready:
            loss = self._step_around_base(rest, [p for p in params if id(p) in fused], closure)
        with torch.no_grad():
            torch_rules.count_step(self.base, (p for part in ready for p in part.parameters))
            for part in ready:
                part.step()
        self.gamma_cache.after_step()
        return loss

    def _step_around_base(
        self, params: list[Tensor], hidden: list[Tensor], closure: Callable[[], Any] | None
    ) -> Any:
        """The base's own step on z of these parameters."""
        gammas = self.gamma_cache.gammas_of(params, self.p)
        inside = [(p, gamma) for p, gamma in zip(params, gammas, strict=True) if gamma is not None]
        # A closure may raise in the middle of a step, when what falls back has moved too.
        fallback = [
            p for p, gamma in zip(params, gammas, strict=True) if gamma is None and closure is not None
        ]
        view = InvariantView(inside, fallback, self._limit() if inside else None)
        with torch.no_grad():
            take_roots(gamma for _, gamma in inside)
            with _hide_gradients(hidden), view.entered():
                return self._step_base(None if closure is None else view.wrap(closure))

    def _by_fused(self) -> list[Ready]:
        """What fused implementations move."""
        if self.max_relative_step is not None:
            return []
        groups = []
        for group in self.base.param_groups:
            rule = torch_rules.rule_of(self.base, group, self.p)
            own = [p for p in group["params"] if p.grad is not None]
            if rule is not None and own:
                for p in own:
                    torch_rules.make_state(self.base, group, p)
                groups.append(GroupRule(rule, own))
        return self._find_ready(groups, torch_rules.TorchState(self.base))

    def _limit(self) -> Limit | None:
        bound = self.max_relative_step
        if bound is None:
            return None
        # Measured now: inside the view the parameters hold z.
        gammas = self.gamma_cache.gammas(self.p)

        def limit(parameters: list[Tensor], weights: list[Tensor], steps: list[Tensor]) -> list[Tensor]:
            bounds = [bound] * len(steps)
            factors = self._step_limit.find(parameters, weights, steps, bounds, self.p, gammas=gammas)
            return [
                step if factor is None else step * factor for step, factor in zip(steps, factors, strict=True)
            ]

        return limit


@contextmanager
def _hide_gradients(parameters: list[Tensor]) -> Iterator[None]:
    """Inside, these have no gradient, so the base optimizer leaves them alone."""
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad


def _take_together(base: Optimizer) -> None:
    """Has Adam take DTensors together if torch would without sharding. One by one, as torch does it, takes
    four times as long and rounds otherwise."""
    for group in base.param_groups if type(base) in (torch.optim.Adam, torch.optim.AdamW) else ():
        chosen = group["foreach"] is not None or group["fused"] or group["differentiable"]
        numbers = not any(isinstance(each, Tensor) for each in (group["lr"], *group["betas"]))
        if not chosen and numbers and all(map(is_sharded, group["params"])):
            local = [local_part(p).detach() for p in group["params"]]
            group["foreach"] = defaults_to_foreach(local, False) or None


def _check_group(group: dict[str, Any]) -> None:
    for name in ("p", "max_relative_step"):
        if name in group:
            raise ValueError(
                f"{name!r} cannot differ between groups of PathNormalized: pass it to PathNormalized itself"
            )
    if "fallback_lr" in group:
        raise ValueError("'fallback_lr' cannot differ between groups: pass it to PathNormalized itself")
