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

from pathsgd.geometry.gamma import check_p
from pathsgd.geometry.shared_weights import Shared, check_shared
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example
from pathsgd.optim.coordinates import Chart, Limit
from pathsgd.optim.fused import torch_rules
from pathsgd.optim.fused.choice import Choice, check_implementation
from pathsgd.optim.fused.dispatch import Plan, Ready
from pathsgd.optim.gamma_cache import GammaCache, source_and_params
from pathsgd.optim.rule import Rule
from pathsgd.optim.step_limit import check_limit


class PathNormalized(Optimizer):
    """``OptimizerClass`` in the geometry of paths: the same options, state, groups and schedules.

    Args:
        optimizer_class: any torch optimizer, of torch or not, LBFGS with its closure included.
        model: the module to train; or its parameters in any form torch takes, with ``graph``.
        example_input: as in :class:`pathsgd.PathSGD`.
        p: the order of the path norm.
        graph, max_relative_step, shared, refresh_every, batch_dim, implementation: as in
            :class:`pathsgd.PathSGD`.
        **options: what the base optimizer takes.

    State is kept on h and z, so it survives a rescaling of the model in mid-training. What a base optimizer
    does not take (Muon: anything but matrices) it does not take here either.

    Stacks of linear layers under torch's SGD, Adagrad, Adam and AdamW are moved by the kernels of PathSGD,
    with no copies. What they have no rule for is taken to z and back around the base's own step, during which
    two copies of those parameters are held, and none between steps: other optimizers, other layers, and
    ``dampening``, ``amsgrad``, ``differentiable``, ``max_relative_step``, ``refresh_every`` and closures.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> optimizer = PathNormalized(torch.optim.AdamW, model, lr=1e-3, weight_decay=0.1)
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> optimizer.step()
    """

    source: GammaCache
    base: Optimizer
    implementation: Choice

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
        **options: Any,
    ) -> None:
        if isinstance(optimizer_class, (Optimizer, nn.Module)) or not callable(optimizer_class):
            raise TypeError(
                "pass the class of the optimizer first, then the model and the optimizer's own options: "
                "PathNormalized(torch.optim.AdamW, model, example_input, lr=1e-4)"
            )
        check_limit(max_relative_step)
        check_shared(shared, check_p(p))
        self.implementation = check_implementation(implementation)
        self._plan: Plan | None = None
        source, params = source_and_params(model, example_input, graph, batch_dim, refresh_every, shared)
        base = optimizer_class(params, **options)
        source.check_known(base.param_groups)
        for group in base.param_groups:
            _check_group(group)
        self._share(base)
        super().__init__(base.param_groups, base.defaults)
        self.source, self.base, self.p = source, base, p
        self.max_relative_step = max_relative_step
        self._share(base)

    def _share(self, base: Optimizer) -> None:
        """Groups, state and defaults are the base's own, so that schedulers and state_dict see them."""
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults

    @property
    def graph(self) -> PathGraph:
        """What is path-normalised and what is not: ``print(optimizer.graph)``."""
        return self.source.traced()

    def refresh(self) -> None:
        """Measure gamma anew at the next step: after writes that torch does not count (``.data``, numpy)."""
        self.source.refresh()
        if self._plan is not None:
            self._plan.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # Called by Optimizer.__init__ for groups the base already holds.
        if hasattr(self, "base"):
            _check_group(param_group)
            self.base.add_param_group(param_group)
            self._share(self.base)

    def load_state_dict(self, state_dict: Any) -> None:
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.base.load_state_dict(state_dict)
        self._share(self.base)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("base", "source", "p", "max_relative_step", "implementation")
        return {**{name: getattr(self, name) for name in kept}, "_plan": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share(self.base)
        super().__setstate__({})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs a single optimization step of the base optimizer in invariant coordinates."""
        work = [p for group in self.param_groups for p in group["params"]]
        chains: list[Ready] = []
        if closure is None:
            work = [p for p in work if p.grad is not None]
            chains = self._by_kernel()
        moved = {id(p) for chain in chains for p in chain.parameters}
        rest = [p for p in work if id(p) not in moved]
        gammas = self.source.gammas_of(rest, self.p)
        inside = [(p, g) for p, g in zip(rest, gammas, strict=True) if g is not None]
        # A closure may raise in the middle of a step, when what falls back has moved too.
        outside = [p for p, g in zip(rest, gammas, strict=True) if g is None] if closure is not None else []
        chart = Chart(inside, outside, self._limit() if inside else None)
        with torch.no_grad(), _hidden(chains), chart.entered():
            loss = self.base.step() if closure is None else self.base.step(chart.wrapped(closure))
        with torch.no_grad():
            torch_rules.count(self.base, (p for chain in chains for p in chain.parameters))
            for chain in chains:
                chain.step()
        self.source.stepped()
        return loss

    def _by_kernel(self) -> list[Ready]:
        """The chains that kernels move."""
        if (
            self.max_relative_step is not None
            or self.source.refresh_every > 1
            or torch.compiler.is_compiling()
        ):
            return []
        rules: dict[int, Rule] = {}
        for group in self.param_groups:
            for p in group["params"]:
                rule = torch_rules.rule_of(self.base, group, p, self.p) if p.grad is not None else None
                if rule is not None:
                    torch_rules.prepare(self.base, group, p)
                    rules[id(p)] = rule
        if not rules:
            return []
        self.source.check_identity()
        if self._plan is None:
            self._plan = Plan(self.source.traced(), self.source.model, self.implementation)
        return self._plan.ready(rules, lambda p: torch_rules.state_of(self.base, p), self.source.gammas)

    def _limit(self) -> Limit | None:
        bound = self.max_relative_step
        if bound is None:
            return None
        found = self.source.gammas(self.p)

        def limit(parameters: list[Tensor], weights: list[Tensor], steps: list[Tensor]) -> list[Tensor]:
            return self.source.limited(found, parameters, weights, steps, [bound] * len(steps), self.p)

        return limit


@contextmanager
def _hidden(chains: list[Ready]) -> Iterator[None]:
    """Inside, the base optimizer finds no gradients on what kernels move: it leaves that alone."""
    parameters = [p for chain in chains for p in chain.parameters]
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad


def _check_group(group: dict[str, Any]) -> None:
    for name in ("p", "max_relative_step", "fallback_lr"):
        if name in group:
            raise ValueError(
                f"{name!r} cannot differ between groups of PathNormalized: pass it to PathNormalized itself"
                if name != "fallback_lr"
                else "'fallback_lr' is an option of PathSGD; give PathNormalized a group with its own lr"
            )


def PathAdagrad(model: Any, example_input: Any = None, lr: float = 1e-2, **options: Any) -> PathNormalized:  # noqa: N802
    """AdaGrad in the geometry of paths."""
    return PathNormalized(torch.optim.Adagrad, model, example_input, lr=lr, **options)


def PathAdam(model: Any, example_input: Any = None, lr: float = 1e-4, **options: Any) -> PathNormalized:  # noqa: N802
    """Adam in the geometry of paths."""
    return PathNormalized(torch.optim.Adam, model, example_input, lr=lr, **options)
