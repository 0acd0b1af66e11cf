"""trace: nn.Module + example input -> PathGraph, through torch.export."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd._torch import export_alone, finish_uncompiled, is_about_values
from pathsgd.errors import TraceError
from pathsgd.graph.export import explain_values, export_at_batch_one
from pathsgd.graph.lowering import lower
from pathsgd.graph.parts import guess_roles, trace_in_parts
from pathsgd.graph.path_graph import PathGraph, remember_model, unwrap
from pathsgd.graph.structure import ParameterInfo, ParameterStatus
from pathsgd.sharding import is_sharded, whole_parameters


@dataclass(frozen=True)
class Inputs:
    """Positional and keyword inputs together, as an example input.

    Attributes:
        args: the positional inputs.
        kwargs: the keyword inputs.

    Example:
        >>> model = nn.Bilinear(2, 3, 1)
        >>> trace(model, Inputs((torch.ones(1, 2),), {"input2": torch.ones(1, 3)})).model
        'Bilinear'
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | Inputs


def trace(
    model: nn.Module, example_input: Example | PathGraph | None = None, *, batch_dim: int | None = 0
) -> PathGraph:
    """Finds the paths of a model: its units, edges and regions.

    Args:
        model: any module. It is not copied and not changed, and run on real data only if it cannot be traced
            as a whole; then those of its modules are traced that can be.
        example_input: a tensor, a tuple of positional inputs, a dict of keyword inputs, or
            :class:`Inputs` for both kinds; only shapes matter, and whether it holds floats or integers. A
            PathGraph is returned as it is. May be left out for an ``nn.Sequential`` whose first is a Linear.
        batch_dim: the batch axis of the inputs. Paths are counted at batch one, whatever the size of
            this axis in the example; all other axes count. ``None`` if there is no batch axis.

    Returns:
        The :class:`PathGraph`. It can be passed wherever an example input is taken.

    Raises:
        TraceError: the model cannot be exported with this example, or has parameters for which paths are not
            defined; the message says what to do.
        DataDependentError: its control flow or its sizes depend on values, and no part of it can be traced.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
        >>> graph = trace(model, torch.empty(8, 3, 4, 4))
        >>> graph
        <PathGraph of Sequential: 4 of 4 parameters path-normalised, 1 region>
    """
    if isinstance(example_input, PathGraph):
        return example_input
    model = unwrap(model)
    _check_parameters(model)
    _check_memory(model)
    with whole_parameters(model):
        args, kwargs = as_inputs(model, example_input)
        graph = _trace_alone(model, args, kwargs, batch_dim)
    graph.in_training.folded, graph.folded  # noqa: B018  found here, so that a compiled step finds them
    remember_model(graph, model)
    finish_uncompiled()
    return graph


ATTEMPTS = 3


def _trace_alone(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int | None
) -> PathGraph:
    """What other threads do to torch's tracing looks like a property of the model: a trace beside one is
    thrown away, its errors too."""
    busy = "another thread is inside torch.export, torch.compile or torch.fx, which keep state of the process"
    advice = "trace while no other does, and pass the graph: graph = pathsgd.trace(model, example_input)"
    for _ in range(ATTEMPTS):
        problem: Exception | None = None
        try:
            with export_alone() as others:
                try:
                    graph = _trace_whole_or_parts(model, args, kwargs, batch_dim)
                except Exception as error:
                    problem = error
        except TimeoutError:
            break
        if not others:
            if problem is not None:
                raise problem
            return graph
    raise TraceError(f"tracing {type(model).__name__} failed: {busy}; {advice}")


def _trace_whole_or_parts(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int | None
) -> PathGraph:
    try:
        program, notes = export_at_batch_one(model, args, kwargs, batch_dim)
        return lower(model, program, notes)
    except TraceError as error:
        reason = error
    except Exception as error:
        if not is_about_values(error):
            raise
        reason = explain_values(type(model).__name__, str(error).splitlines()[0])
    graph = trace_in_parts(model, args, kwargs, str(reason))
    if graph is None:
        raise reason
    return graph


def _check_parameters(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TraceError(f"expected an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError("a ScriptModule cannot be traced; pass the module it was made from")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise TraceError(
            "FullyShardedDataParallel keeps parameters flattened, so that their paths cannot be seen; use "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    named = list(model.named_parameters())
    if not named:
        raise TraceError(f"{type(model).__name__} has no parameters: there is nothing to trace")
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TraceError(f"parameter {name!r} is lazy: run the model on one batch first")
        if parameter.is_complex():
            raise TraceError(
                f"parameter {name!r} is complex; path norms are defined for real weights: "
                "hold its real and imaginary parts as two real parameters"
            )
        if parameter.layout != torch.strided:
            raise TraceError(
                f"parameter {name!r} has layout {parameter.layout}; make it dense with .to_dense()"
            )


def _check_memory(model: nn.Module) -> None:
    """Two names for one piece of memory would be rescaled twice."""
    spans = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta or is_sharded(tensor) or not tensor.numel() or tensor.layout != torch.strided:
            continue
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise TraceError(
                f"{name!r} is an expanded tensor whose entries share memory; make it .contiguous()"
            )
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        spans.append((start, start + (reach + 1) * tensor.element_size(), name))
    spans.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise TraceError(
                f"{first!r} and {second!r} share memory but are different tensors; make them one Parameter "
                "(b.weight = a.weight) or give each its own memory"
            )


def as_inputs(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example is None:
        first = next(iter(model.children()), None) if isinstance(model, nn.Sequential) else None
        if not isinstance(first, nn.Linear):
            raise TraceError(
                "example_input can be left out only for an nn.Sequential that starts with a Linear; "
                "pass a tensor of the shape the model takes"
            )
        return (first.weight.new_zeros(1, first.in_features),), {}
    if isinstance(example, Inputs):
        return tuple(example.args), dict(example.kwargs)
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def describe_untraced(model: nn.Module, reason: str) -> PathGraph:
    """A graph without paths: steps are relative to the weights themselves."""
    roles = guess_roles(model)
    parameters = {
        name: ParameterInfo(
            name, tuple(p.shape), p.requires_grad, ParameterStatus.OUTSIDE,
            "outside: the model could not be traced", roles[name],
        )
        for name, p in model.named_parameters()
    }  # fmt: skip
    graph = PathGraph(type(model).__name__, (), {}, (), (), parameters, (reason,))
    graph.in_training.folded  # noqa: B018  as trace does
    remember_model(graph, model)
    return graph
