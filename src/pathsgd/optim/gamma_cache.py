"""Where an optimizer gets its gammas from: a model and its graph, traced at once or at the first step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pathsgd.errors import PathError
from pathsgd.geometry.gamma import Gamma, Gammas, measure_gammas
from pathsgd.geometry.shared_weights import Shared
from pathsgd.graph.path_graph import PathGraph, traced_model, unwrap
from pathsgd.graph.trace import Example, Inputs, trace
from pathsgd.optim.captured_gammas import CapturedGammas
from pathsgd.optim.step_limit import Incoming, families, limited
from pathsgd.optim.watch import Stamp, blind, stamps

WARM_UP = 3
"""Measurements before one is recorded on a GPU."""


class GammaCache:
    """Keeps the model, traces it when it can, and measures gamma when it is asked to.

    Without an example the shapes of the first batch the model takes are recorded (by a forward hook that
    does nothing else) and the model is traced when a step first asks for scales.
    """

    def __init__(
        self,
        model: nn.Module,
        example_input: Example | PathGraph | None,
        batch_dim: int | None = 0,
        refresh_every: int = 1,
        shared: Shared = "kappa1",
    ) -> None:
        if refresh_every < 1:
            raise ValueError(f"Invalid refresh_every value: {refresh_every}")
        self.model = unwrap(model)
        self.batch_dim = batch_dim
        self.refresh_every = refresh_every
        self.shared = shared
        self.graph: PathGraph | None = None
        self._recorded: Any = None
        self._handle: RemovableHandle | None = None
        self._kept: dict[float, Gammas] = {}
        self._steps = 0
        self._stamped: list[Stamp] = []
        self._recorded_scales: dict[float, CapturedGammas] = {}
        self._measurements = 0
        self._families: list[list[Incoming]] | None = None
        self.exponents: dict[float, bool] = {}
        if example_input is not None or _starts_with_linear(self.model):
            self.graph = trace(self.model, example_input, batch_dim=batch_dim)
        else:
            self._listen()
        self.names = {id(p): name for name, p in self.model.named_parameters()}

    def _listen(self) -> None:
        self._handle = self.model.register_forward_hook(_Recorder(self), with_kwargs=True)

    def record(self, args: Any, kwargs: Any) -> None:
        """The first batch the model has taken: its shapes are kept, and nothing more is listened to."""

        def described(x: Any) -> Any:
            return _Shape(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x

        self._recorded = pytree.tree_map(described, (args, kwargs))
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def traced(self) -> PathGraph:
        """The graph, traced now if it has not been."""
        if self.graph is None:
            if self._recorded is None:
                raise PathError(
                    "the model has seen no batch yet, so its paths are not known: run it before the "
                    "first step, or pass example_input"
                )
            args, kwargs = pytree.tree_map(_zeros, self._recorded)
            self.graph = trace(self.model, Inputs(args, kwargs), batch_dim=self.batch_dim)
        return self.graph

    def gammas(self, p: float) -> Gammas:
        """gamma of every parameter of the model, measured now unless it may be reused."""
        if self._kept and not blind() and self._stamp() != self._stamped:
            self.refresh()  # somebody else has written weights
        if p not in self._kept:
            graph = self.traced()
            if blind():
                # Whether floats are enough depends on the weights, which a compiled or captured graph
                # cannot look at: it does what the last step outside it did.
                exponents = self.exponents.get(p, False)
                return measure_gammas(
                    graph, graph.tensors(self.model), p, exponents=exponents, shared=self.shared
                )
            self.check_identity()
            self._kept[p] = self._measured(graph, p)
            self.exponents[p] = self._kept[p].exponents
            self._stamped = self._stamp()
        return self._kept[p]

    def _measured(self, graph: PathGraph, p: float) -> Gammas:
        """gamma as the weights stand: on a GPU by a recorded CUDA graph, once it has been seen to fit."""
        tensors = graph.tensors(self.model)
        recorded = self._recorded_scales.pop(p, None)
        if recorded is not None and recorded.fits(tensors):
            found = recorded.replay()
            if found is not None:
                self._recorded_scales[p] = recorded
                return found
        found = measure_gammas(graph, tensors, p, shared=self.shared)
        self._measurements += 1
        on_gpu = all(tensor.is_cuda for tensor in tensors.values())
        if on_gpu and self._measurements > WARM_UP and self.shared == "kappa1" and not found.exponents:
            self._recorded_scales[p] = CapturedGammas(graph, tensors, p)
            self._measurements = 0  # weights that keep moving about are not recorded every time
        return found

    def calibrate(self, p: float) -> None:
        """Finds out whether plain floats are enough now, for a step that is compiled before any is run."""
        if self.graph is not None:
            self.gammas(p)
            self.refresh()

    def stepped(self) -> None:
        """A step has moved the weights: what was measured is stale, or will be soon."""
        if blind():
            return  # nothing was kept, and a count would make torch compile again
        self._steps += 1
        if self._steps % self.refresh_every == 0:
            self.refresh()
        elif self._kept:
            self._stamped = self._stamp()

    def refresh(self) -> None:
        """Forgets what was measured."""
        self._kept.clear()

    def _stamp(self) -> list[Stamp]:
        """Running statistics move with every batch: where a gamma may be old anyway they do not count."""
        return stamps([*self.model.parameters(), *(self.model.buffers() if self.refresh_every == 1 else ())])

    def gammas_of(self, parameters: Sequence[Tensor], p: float) -> list[Gamma | None]:
        """gamma of each of these parameters; None for one that falls back to gamma = 1."""
        if not parameters:
            return []
        graph, found = self.traced(), self.gammas(p)
        names = [self.names.get(id(parameter)) for parameter in parameters]
        return [
            found[name] if name is not None and graph.parameters[name].normalised else None for name in names
        ]

    def limited(
        self,
        found: Gammas,
        parameters: Sequence[Tensor],
        weights: Sequence[Tensor],
        steps: Sequence[Tensor],
        bounds: Sequence[float | None],
        p: float,
    ) -> list[Tensor]:
        """Steps of these parameters in invariant coordinates, each kept to its bound (if it has one) on how
        far the unit it leads into may move. All parameters of a step together, with ``weights`` and gammas
        from before it."""
        if self._families is None:
            self._families = families(self.traced())
        names = [self.names.get(id(parameter)) for parameter in parameters]
        moved = {name: step for name, step in zip(names, steps, strict=True) if name is not None}
        bound = {
            name: limit
            for name, limit in zip(names, bounds, strict=True)
            if name is not None and limit is not None
        }
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        tensors.update({name: w for name, w in zip(names, weights, strict=True) if name is not None})
        z = {
            name: found[name].weight_to_z(tensors[name].detach().to(found[name].arithmetic.dtype))
            for name in {part.name for family in self._families for part in family}
        }
        short = limited(self._families, moved, z, bound, p)
        return [step if name is None else short[name] for name, step in zip(names, steps, strict=True)]

    def check_known(self, groups: Sequence[dict[str, Any]]) -> None:
        """At least one of the optimizer's parameters is the model's; others may come along."""
        parameters = [parameter for group in groups for parameter in group["params"]]
        if parameters and not any(id(parameter) in self.names for parameter in parameters):
            raise TypeError(
                "none of these parameters belongs to the model the graph was traced from (those of a copy "
                "do not), so this would silently be SGD: trace the model they belong to"
            )

    def check_identity(self) -> None:
        """The model still has the Parameters it had."""
        for name, parameter in self.model.named_parameters():
            if self.names.get(id(parameter)) != name:
                raise PathError(
                    f"parameter {name!r} is not the one the optimizer was made with (it was replaced or "
                    "added since); make the optimizer again"
                )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        # A hook does not travel; a copy that was never traced asks for a batch again.
        state.update(_handle=None, _kept={}, _recorded_scales={}, names=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.names = {id(p): name for name, p in self.model.named_parameters()}
        if self.graph is None and self._recorded is None:
            self._listen()


class _Recorder:
    """A forward hook that tells a source of the first batch. It hangs on the model, so it must not hold the
    source, which holds the model: a copy of the model, or a saved one, has a recorder that does nothing."""

    def __init__(self, source: GammaCache | None = None) -> None:
        self.source = None if source is None else weakref.ref(source)

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        source = None if self.source is None else self.source()
        if source is not None:
            source.record(args, rest[0] if len(rest) > 1 else {})

    def __deepcopy__(self, memo: Any) -> _Recorder:
        return _Recorder()

    def __reduce__(self) -> Any:
        return _Recorder, ()


class _Shape:
    """A tensor of the first batch, without its numbers. Not a tuple: pytree would open it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def _zeros(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, _Shape) else x


def _starts_with_linear(model: nn.Module) -> bool:
    first = next(iter(model.children()), None)
    return isinstance(model, nn.Sequential) and isinstance(first, nn.Linear)


def source_and_params(
    model_or_params: Any,
    example_input: Example | PathGraph | None,
    graph: PathGraph | None,
    batch_dim: int | None,
    refresh_every: int,
    shared: Shared,
) -> tuple[GammaCache, Iterable[Any]]:
    """What ``PathSGD(model, ...)`` and ``PathSGD(params, graph=...)`` have in common."""
    if isinstance(example_input, (int, float)):
        raise TypeError(f"example_input comes after the model, and lr by its name: lr={example_input}")
    if isinstance(model_or_params, nn.Module):
        source = GammaCache(model_or_params, graph or example_input, batch_dim, refresh_every, shared)
        return source, list(source.model.parameters())
    if graph is None and isinstance(example_input, PathGraph):
        graph = example_input
    model = traced_model(graph) if graph is not None else None
    if model is None:
        raise TypeError(
            "parameters alone do not say what their paths are, and without paths this would silently be "
            "SGD: pass the model itself, PathSGD(model, example_input, lr=...), or the parameters with "
            "graph=pathsgd.trace(model, example_input)"
        )
    return GammaCache(model, graph, batch_dim, refresh_every, shared), model_or_params
