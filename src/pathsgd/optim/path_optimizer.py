"""What PathSGD and PathNormalized have in common: a model, its gammas, and the fused implementations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from pathsgd import _torch
from pathsgd.errors import PathError
from pathsgd.geometry.gamma import check_p
from pathsgd.geometry.shared_weights import Shared, check_shared
from pathsgd.graph.path_graph import PathGraph, traced_model
from pathsgd.graph.trace import Example
from pathsgd.optim.fused.dispatch import Choice, Dispatch, Ready, check_implementation
from pathsgd.optim.fused.implementation import OptimizerState
from pathsgd.optim.gamma_cache import GammaCache
from pathsgd.optim.relative.steps import RelativeSteps
from pathsgd.optim.rule import GroupRule


class PathOptimizer(Optimizer):
    """The base class of the optimizers on paths."""

    gamma_cache: GammaCache
    implementation: Choice
    _dispatch: Dispatch | None
    relative: bool
    _relative: RelativeSteps
    _needs_paths = True
    """Whether what falls back is trained worse: no paths are an error then, and few a warning."""

    def _connect(
        self,
        model: nn.Module | Iterable[Any],
        example_input: Example | PathGraph | None,
        *,
        p: float,
        graph: PathGraph | None,
        batch_dim: int | None,
        refresh_every: int,
        shared: Shared,
        implementation: Choice,
    ) -> Iterable[Any]:
        """Ties the optimizer to a model; returns the parameters to optimize."""
        check_shared(shared, check_p(p))
        self.implementation = check_implementation(implementation)
        self._dispatch = None
        if isinstance(example_input, (int, float)):
            raise TypeError(f"example_input comes after the model, and lr by its name: lr={example_input}")
        params: Iterable[Any] | None = None
        if isinstance(model, nn.Module):
            example_input = graph or example_input
        else:
            params = model
            graph = graph or (example_input if isinstance(example_input, PathGraph) else None)
            traced = None if graph is None else traced_model(graph)
            if traced is None:
                raise TypeError(
                    "parameters alone do not say what their paths are, and without paths this would silently "
                    f"be SGD: pass the model itself, {type(self).__name__}(model, example_input), or the "
                    "parameters with graph=pathsgd.trace(model, example_input)"
                )
            model, example_input = traced, graph
        self.gamma_cache = GammaCache(
            model, example_input, batch_dim, refresh_every, shared, self._needs_paths
        )
        return list(self.gamma_cache.model.parameters()) if params is None else params

    def _check_sharded(self, **options: object) -> None:
        """Options for which there are no rules with sharded parameters."""
        given = [name for name, value in options.items() if value not in (None, False)]
        if given and self.gamma_cache.sharded:
            raise PathError(
                f"{given[0]} is not supported with sharded parameters (DTensor) yet; PathSGD and "
                "PathNormalized without it are, and with DistributedDataParallel all of them"
            )

    def _check_gradients_arrive(self) -> None:
        """If no parameter has a gradient, it may be because the model has others by now."""
        if not any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self.gamma_cache.check_identity()

    @property
    def graph(self) -> PathGraph:
        """What is path-normalised and what is not: ``print(optimizer.graph)``.

        Raises:
            PathError: no example was given and the model has seen no batch yet.
        """
        return self.gamma_cache.graph

    @property
    def implementations(self) -> dict[str, str]:
        """Which implementation moved each parameter in the last step that was run: ``"triton"``,
        ``"blocked"`` or ``"reference"``, by the parameter's name."""
        fused = {} if self._dispatch is None else self._dispatch.last_kinds
        if self.relative:
            fused = self._relative.last_kinds
        return {
            name: fused.get(id(parameter), "reference")
            for name, parameter in self.gamma_cache.model.named_parameters()
        }

    def refresh(self) -> None:
        """Measures gamma anew at the next step.

        Call it after writing weights in a way that torch does not count: through ``.data``, numpy, one of
        torch's fused optimizers on a CPU, or the replay of a CUDA graph, if the next step is not in it.
        Ordinary in-place writes are noticed. With several ranks call it on
        all of them.
        """
        self.gamma_cache.refresh()
        if self._dispatch is not None:
            self._dispatch.forget()

    def _restore_precision(self, state_dict: Any, keys: Sequence[str]) -> None:
        """State of these names as it was saved: torch rounds it to the parameter's precision."""
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key in keys:
                kept = state_dict["state"].get(number, {}).get(key)
                if kept is not None:
                    self.state[parameter][key] = kept.detach().clone().to(parameter.device)

    def _find_ready(self, groups: list[GroupRule], state: OptimizerState) -> list[Ready]:
        """What fused implementations can move now of parameters that have a rule. Nothing is written yet."""
        if not groups or _torch.is_compiling() or _torch.is_forward_mode() or self.gamma_cache.sharded:
            return []
        if self._dispatch is None:
            self._dispatch = Dispatch(self.graph, self.gamma_cache, self.implementation)
        return self._dispatch.ready(groups, state)
