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

from pathsgd._torch import load_state_dict_hooks
from pathsgd.errors import PathError, check_p, check_state
from pathsgd.geometry.gamma import Gamma
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example
from pathsgd.paths.model_gammas import ModelGammas
from pathsgd.sharding import place_gradients
from pathsgd.training.lazy_graph import connect


class PathNormalized(Optimizer):
    """A torch optimizer in the geometry of paths: the same options, state, groups and schedules.

    The paper's outlook: AdaGrad, momentum and others on paths. State is kept on h and z, so it survives a
    rescaling of the model in mid-training. What a base optimizer does not take (Muon: anything but matrices)
    it does not take here either. During a step two copies of the parameters are held, and none between steps.

    Args:
        optimizer_class: any torch optimizer, of torch or not, LBFGS with its closure included.
        model: the module to train; or its parameters in any form torch takes, with ``graph``.
        example_input: a tensor, a tuple of inputs or a dict of keyword inputs of the model; only shapes
            matter. May be left out: the model is then traced from the first batch it sees.
        p: the order of the path norm, 1 <= p <= inf.
        graph: the graph of the model, if it was traced before.
        batch_dim: the batch axis of the inputs, see :func:`pathsgd.trace`.
        **options: what the base optimizer takes.

    Raises:
        TypeError: the class of the optimizer does not come first, or parameters were passed without the
            graph of their model.
        ValueError: an option is out of its range.
        TraceError: the model cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = PathNormalized(torch.optim.Adagrad, model, lr=1e-3)
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
        batch_dim: int | None = 0,
        **options: Any,
    ) -> None:
        if isinstance(optimizer_class, (Optimizer, nn.Module)) or not callable(optimizer_class):
            raise TypeError(
                "pass the class of the optimizer first, then the model and the optimizer's own options: "
                "PathNormalized(torch.optim.AdamW, model, example_input, lr=1e-4)"
            )
        check_p(p)
        lazy_graph, params = connect(
            "PathNormalized(torch.optim.AdamW, model",
            model,
            example_input,
            graph,
            batch_dim,
            needs_paths=True,
        )
        self.gammas = ModelGammas(lazy_graph)
        base = optimizer_class(params, **options)
        self.gammas.tensors.check_groups(base.param_groups)
        for group in base.param_groups:
            _check_group(group)
        self._share(base)
        super().__init__(self.param_groups, base.defaults)
        self.base, self.p = base, p
        self._share(base)

    @property
    def graph(self) -> PathGraph:
        """The path graph, which shows what is path-normalised and what is not: ``print(optimizer.graph)``.

        Raises:
            PathError: no example was given and the model has seen no batch yet.
        """
        return self.gammas.graph

    def _share(self, base: Optimizer) -> None:
        """Groups, state and defaults are those of the base, so that schedulers and state_dict see them."""
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults

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

        Raises:
            ValueError: it is the state of another optimizer.
        """
        before, after = load_state_dict_hooks(self)
        for hook in before:
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_state(state_dict, self.defaults)
        self.base.load_state_dict(state_dict)
        self._share(self.base)
        for hook in after:
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("base", "gammas", "p")}

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
        params = [p for group in self.param_groups for p in group["params"]]
        if closure is None:
            params = [p for p in params if p.grad is not None]
            if not params:
                self.gammas.tensors.check_identity()  # gradients may be those of other parameters by now
        gammas = self.gammas.select(params, self.p)
        pairs = list(zip(params, gammas, strict=True))
        inside = [(p, gamma) for p, gamma in pairs if gamma is not None]
        # A closure may raise in the middle of a step, when what has gamma = 1 has moved too.
        view = InvariantView(inside, [p for p, gamma in pairs if gamma is None and closure is not None])
        with torch.no_grad(), view.entered():
            return self.base.step() if closure is None else self.base.step(view.wrap(closure))


class InvariantView:
    """Parameters that hold z, and h as their gradient, inside :meth:`entered`.

    In place, on the same Parameters. Two copies are held meanwhile, one of the weights and one of the
    gradients.

    Args:
        parameters: with their gammas.
        others: what is put back as well if there is an error.
    """

    def __init__(self, parameters: list[tuple[Tensor, Gamma]], others: list[Tensor]) -> None:
        self.parameters = parameters
        self.others = others
        self.start: list[Tensor] = []
        self.grads: list[Tensor | None] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On an error everything is put back."""
        self.start = [p.detach().clone() for p, _ in self.parameters]
        others = [(p, p.detach().clone()) for p in self.others]
        self.grads = [p.grad for p, _ in self.parameters]
        try:
            for p, gamma in self.parameters:
                p.copy_(gamma.weight_to_z(p.detach()))
            self._check_range()
            self._gradients_to_z()
            yield
        except BaseException:
            inside = (p for p, _ in self.parameters)
            for p, value in [*zip(inside, self.start, strict=True), *others]:
                p.copy_(value)
            raise
        else:
            for k, (p, _) in enumerate(self.parameters):
                p.copy_(self._find_weight(k))
        finally:
            for (p, _), grad in zip(self.parameters, self.grads, strict=True):
                p.grad = grad

    def wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure as a function of z: evaluated at the weights z stands for, its gradient as h."""

        @torch.no_grad()
        def evaluate() -> Any:
            here = [p.detach().clone() for p, _ in self.parameters]
            for k, (p, _) in enumerate(self.parameters):
                p.copy_(self._find_weight(k))
            for (p, _), grad in zip(self.parameters, self.grads, strict=True):
                p.grad = grad
            with torch.enable_grad():
                loss = closure()
            self.grads = [p.grad for p, _ in self.parameters]
            for (p, _), value in zip(self.parameters, here, strict=True):
                p.copy_(value)
            self._gradients_to_z()
            return loss

        return evaluate

    def _check_range(self) -> None:
        """z may be beyond fp16 where w is not; bf16 has the range of fp32. If a w is nan, that is why."""
        low = [p for p, _ in self.parameters if p.dtype == torch.float16]
        if not all(map(_is_finite, low)) and all(map(_is_finite, self.start)):
            raise PathError(
                "a weight in invariant coordinates is beyond the range of float16, in which this "
                "optimizer keeps it: use bfloat16 or float32 parameters, or PathSGD"
            )

    def _gradients_to_z(self) -> None:
        place_gradients(p for p, _ in self.parameters)
        for p, gamma in self.parameters:
            if p.grad is not None:
                if p.grad.is_sparse:
                    raise RuntimeError("PathNormalized does not support sparse gradients")
                p.grad = gamma.gradient_to_z(p.grad.detach()).to(p.dtype)

    def _find_weight(self, k: int) -> Tensor:
        """``w + (z' - z) / sqrt(gamma)``: exactly w where the optimizer did not move."""
        (p, gamma), start = self.parameters[k], self.start[k]
        # z computed again as it was written: a parameter of low precision rounds it.
        z = gamma.weight_to_z(start).to(p.dtype)
        dtype = torch.promote_types(p.dtype, torch.float32)
        return gamma.step_from_z(p.detach().to(dtype) - z.to(dtype)).to(p.dtype).add_(start)


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _check_group(group: dict[str, Any]) -> None:
    if "p" in group:
        raise ValueError(
            "'p' cannot differ between groups of PathNormalized: pass it to PathNormalized itself"
        )
