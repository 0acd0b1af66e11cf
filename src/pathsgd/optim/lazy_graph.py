"""The path graph of a model: traced at once from an example, or later from the first batch the model sees."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pathsgd._torch import tree_map
from pathsgd.errors import DataDependentError, PathError
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.small_share import explain_small_share
from pathsgd.graph.trace import Example, Inputs, trace
from pathsgd.graph.untraced import describe_untraced
from pathsgd.optim.weak_hook import WeakHook


class LazyGraph:
    """Without an example, a forward hook records the shapes of the first batch, and nothing else; the model
    is traced from them when the graph is first needed."""

    def __init__(
        self,
        model: nn.Module,
        example_input: Example | PathGraph | None,
        batch_dim: int | None,
        needs_paths: bool = True,
    ) -> None:
        self.model = model
        self.batch_dim = batch_dim
        self.needs_paths = needs_paths
        self.graph: PathGraph | None = None
        self._first_batch: Any = None
        self._handle: RemovableHandle | None = None
        if example_input is not None or _starts_with_linear(model):
            self._trace(example_input)
        else:
            self._add_hook()

    @property
    def is_known(self) -> bool:
        """Whether there is a graph, or a batch to trace it from."""
        return self.graph is not None or self._first_batch is not None

    def get(self) -> PathGraph:
        """The graph, traced now if it has not been."""
        if self.graph is None:
            if self._first_batch is None:
                raise PathError(
                    "the model has seen no batch yet, so its paths are not known: run it before the "
                    "first step, or pass example_input"
                )
            args, kwargs = tree_map(_zeros, self._first_batch)
            return self._trace(Inputs(args, kwargs))
        return self.graph

    def _trace(self, example_input: Example | PathGraph | None) -> PathGraph:
        """Without paths plain steps are those of the base optimizer; relative steps are still relative."""
        message = None
        try:
            self.graph = trace(self.model, example_input, batch_dim=self.batch_dim)
            if self.needs_paths:
                message = explain_small_share(self.graph)
        except DataDependentError as error:
            if self.needs_paths:
                raise
            self.graph = describe_untraced(self.model, str(error))
            message = f"no parameter is path-normalised, so steps depend on how units are scaled: {error}"
        if message is not None:
            warnings.warn(message, stacklevel=depth_of_caller())
        return self.graph

    def record(self, args: Any, kwargs: Any) -> None:
        """Keeps the shapes of a batch, and removes the hook."""

        def describe(x: Any) -> Any:
            return _Shape(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x

        self._first_batch = tree_map(describe, (args, kwargs))
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _add_hook(self) -> None:
        self._handle = self.model.register_forward_hook(_Recorder(self), with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}  # a hook does not travel

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.graph is None and self._first_batch is None:
            self._add_hook()


def depth_of_caller() -> int:
    """How many frames up the user's own code is."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "pathsgd",
        "torch",
    ):
        depth, frame = depth + 1, frame.f_back
    return depth


class _Recorder(WeakHook):
    def tell(self, owner: LazyGraph, *arguments: Any) -> None:
        _, args, *rest = arguments
        owner.record(args, rest[0] if len(rest) > 1 else {})


class _Shape:
    """A tensor of the first batch without its values. Not a tuple, which tree_map would open."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def _zeros(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, _Shape) else x


def _starts_with_linear(model: nn.Module) -> bool:
    first = next(iter(model.children()), None)
    return isinstance(model, nn.Sequential) and isinstance(first, nn.Linear)
