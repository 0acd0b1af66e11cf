"""The path graph of a model: traced at once from an example, or later from the first batch the model sees."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pathsgd._torch import finish_uncompiled, keep_uncompiled, tree_map
from pathsgd.errors import DataDependentError, PathError
from pathsgd.graph.path_graph import PathGraph, traced_model, unwrap
from pathsgd.graph.protection import explain_few_paths
from pathsgd.graph.trace import Example, Inputs, describe_untraced, trace


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

    def get(self) -> PathGraph:
        """The graph, traced now if it has not been.

        Raises:
            PathError: no example was given and the model has seen no batch.
        """
        if self.graph is None:
            if self._first_batch is None:
                raise PathError(
                    "the model has seen no batch yet, so its paths are not known: run it before the "
                    "first step, or pass example_input"
                )
            args, kwargs = tree_map(_make_zeros("cpu"), self._first_batch)
            return self._trace(Inputs(args, kwargs))
        return self.graph

    def _trace(self, example_input: Example | PathGraph | None) -> PathGraph:
        """Without paths plain steps are those of the base optimizer; relative steps are still relative."""
        message = None
        try:
            self.graph = trace(self.model, example_input, batch_dim=self.batch_dim)
            if self.needs_paths:
                message = explain_few_paths(self.graph.in_training)
        except DataDependentError as error:
            if self.needs_paths:
                raise
            self.graph = describe_untraced(self.model, str(error))
            message = f"no parameter is path-normalised, so steps depend on how units are scaled: {error}"
        if message is not None:
            warnings.warn(message, stacklevel=find_depth_of_caller())
        return self.graph

    def record(self, args: Any, kwargs: Any) -> None:
        """Keeps the shapes of a batch, and removes the hook."""
        self._first_batch = tree_map(_make_zeros("meta"), (args, kwargs))
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _add_hook(self) -> None:
        finish_uncompiled()  # the model may be compiled before it is traced
        self._handle = self.model.register_forward_hook(_Recorder(self), with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}  # a hook does not travel

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.graph is None and self._first_batch is None:
            self._add_hook()


def connect(
    call: str,
    model: nn.Module | Iterable[Any],
    example_input: Example | PathGraph | None,
    graph: PathGraph | None,
    batch_dim: int | None,
    needs_paths: bool,
) -> tuple[LazyGraph, Iterable[Any]]:
    """Ties an optimizer to a model: the graph of the module, and the parameters to optimize. ``call`` is how
    the optimizer is called, up to the model.

    Raises:
        TypeError: parameters were passed without the graph of their model, or what ``graph`` is is none.
    """
    if isinstance(example_input, (int, float)):
        raise TypeError(f"example_input comes after the model, and lr by its name: lr={example_input}")
    if graph is not None and not isinstance(graph, PathGraph):
        raise TypeError(
            f"graph= takes what pathsgd.trace(model, example_input) returns, got {type(graph).__name__}; an "
            f"example input follows the model: {call}, example_input)"
        )
    if isinstance(model, nn.Module):
        module = unwrap(model)
        return LazyGraph(module, graph or example_input, batch_dim, needs_paths), list(module.parameters())
    graph = graph or (example_input if isinstance(example_input, PathGraph) else None)
    traced = None if graph is None else traced_model(graph)
    if traced is None:
        found = (
            "parameters alone do not say which model they are of" if graph is None
            else "the model that this graph was traced from is gone, or the graph is a copy"
        )  # fmt: skip
        raise TypeError(
            f"{found}: pass the model itself, {call}, example_input), or its parameters, in groups too, with "
            "graph=pathsgd.trace(model, example_input)"
        )
    return LazyGraph(traced, graph, batch_dim, needs_paths), model


def find_depth_of_caller() -> int:
    """Number of frames up to the user's own code."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "pathsgd",
        "torch",
    ):
        depth, frame = depth + 1, frame.f_back
    return depth


class _Recorder:
    """The hook. It hangs on the model, so it must not own an owner that owns the model; in a copy of the
    model it does nothing."""

    def __init__(self, owner: LazyGraph | None = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)

    @keep_uncompiled  # a graph break, as any hook of Python is
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        owner = None if self.owner is None else self.owner()
        if owner is not None:
            owner.record(args, kwargs)

    def __reduce__(self) -> Any:
        return type(self), ()


def _make_zeros(device: str) -> Callable[[Any], Any]:
    """What replaces a tensor by zeros of its shape; on the meta device they have no memory."""
    return lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device) if isinstance(x, Tensor) else x


def _starts_with_linear(model: nn.Module) -> bool:
    first = next(iter(model.children()), None)
    return isinstance(model, nn.Sequential) and isinstance(first, nn.Linear)
