"""The path norm phi_p of a network."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor, nn

from pathsgd.errors import PathError, check_p
from pathsgd.geometry.passes import PoweredNetwork, check_range, is_in_range
from pathsgd.geometry.scaled import Arithmetic, Scaled, scale_by_power
from pathsgd.graph.path_graph import PathGraph, compute_dtype
from pathsgd.graph.structure import ParameterStatus
from pathsgd.graph.trace import Example, trace
from pathsgd.training.capture import replay_calls


@overload
def path_norm(
    model: nn.Module,
    example_input: Example | PathGraph | None = ...,
    p: float = ...,
    *,
    per_output: Literal[False] = ...,
    log: bool = ...,
    region: int | None = ...,
) -> Tensor: ...
@overload
def path_norm(
    model: nn.Module,
    example_input: Example | PathGraph | None = ...,
    p: float = ...,
    *,
    per_output: Literal[True],
    log: bool = ...,
    region: int | None = ...,
) -> list[Tensor]: ...
def path_norm(
    model: nn.Module,
    example_input: Example | PathGraph | None = None,
    p: float = 2,
    *,
    per_output: bool = False,
    log: bool = False,
    region: int | None = None,
) -> Tensor | list[Tensor]:
    """The path norm ``phi_p(w) = (sum over paths of |product of weights|^p)^(1/p)``, differentiable.

    Args:
        model: the module to measure.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        p: the order of the norm, from 1 to ``math.inf``.
        per_output: the norm of the paths into each output unit instead.
        log: the natural logarithm of the norm, finite at any depth.
        region: the norm of one region (numbered as in ``print(graph)``) of a model that is not one network of
            paths from its inputs to its outputs.

    Returns:
        A tensor of one number; with ``per_output`` one tensor for each output of the model, at batch one.

    Raises:
        TraceError: the model cannot be traced.
        PathError: p or region is invalid, the model is not one region, or the graph is of another model.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> _ = model[0].weight.data.fill_(3.0), model[2].weight.data.fill_(0.5)
        >>> path_norm(model, p=1).item()
        3.0
    """
    check_p(p)
    graph = trace(model, example_input)
    tensors = graph.tensors(model)
    ends = _choose_ends(graph, region)
    if per_output and region is None:
        ends = list(graph.outputs)
    places = [graph.folded.whole[k] for k in ends]

    def measure(centered: bool = False) -> tuple[list[Tensor], PoweredNetwork]:
        arithmetic = Arithmetic(float(p), centered)
        network = PoweredNetwork(graph.folded.graph, tensors, arithmetic, looks=True)
        gamma_in = network.forward(places)
        values = [gamma_in[k] for k in places]
        if not per_output:
            values = [_sum(arithmetic, values, network.device)]
        return [_take_root(arithmetic, value, log) for value in values], network

    norms, network = replay_calls(graph, tensors, (float(p), tuple(ends), per_output, log), measure)
    if not is_in_range(network):
        norms, network = measure(centered=True)
        check_range(network, places, backward=False)
    dtype = compute_dtype(tensors)
    norms = norms if log else [value.to(dtype) for value in norms]
    return norms if per_output else norms[0]


def _sum(arithmetic: Arithmetic, values: list[Scaled], device: torch.device) -> Scaled:
    sums = [arithmetic.reduce(Scaled(m.reshape(-1), n), [0]) for m, n in values if m.numel()] or [
        Scaled(torch.zeros(1, dtype=torch.float64, device=device), torch.zeros((), device=device))
    ]
    total = arithmetic.add(sums)
    return Scaled(total.mantissa.reshape(()), total.exponent)


def _take_root(arithmetic: Arithmetic, x: Scaled, log: bool) -> Tensor:
    """``x^(1/p)`` or its logarithm. A dead output gives 0 (or -inf) and no gradient instead of NaN."""
    alive = x.mantissa != 0  # a nan is not dead
    base = torch.where(alive, x.mantissa, 1)
    if log:
        value = base.log() / arithmetic.order + x.exponent * math.log(2)
        return torch.where(alive, value, -math.inf)
    value = (
        scale_by_power(arithmetic.root(base), torch.where(x.mantissa.detach().amax() == 0, 0, x.exponent))
        if base.numel()
        else base
    )
    return torch.where(alive, value, 0)


def _choose_ends(graph: PathGraph, region: int | None) -> list[int]:
    """The nodes whose path weights are summed: the ends of one region."""
    regions = graph.parameter_regions()
    if region is not None:
        if not 0 <= region < len(regions):
            raise PathError(f"there is no region {region}; the graph has {len(regions)}")
        return [k for k in graph.ends if graph.regions[k] == regions[region]]
    if len(regions) > 1:
        reasons = sorted({reason for _, _, reason in graph.boundaries})
        raise PathError(
            f"{graph.model} is not one network of paths but {len(regions)} regions "
            f"({'; '.join(reasons) or 'parts that are not connected'}); pass region=k, with k from 0 to "
            f"{len(regions) - 1}, to measure one of them (print(trace(model, example_input)) shows them)"
        )
    outside = [name for name, info in graph.parameters.items() if info.status is ParameterStatus.OUTSIDE]
    if outside and regions:
        raise PathError(
            f"parameter {outside[0]!r} of {graph.model} is on no path, so a norm of paths says nothing about "
            f"it ({graph.parameters[outside[0]].reason}); pass region=0 to measure the rest"
        )
    if not regions:
        raise PathError(f"no parameter of {graph.model} lies on a path")
    return [k for k in graph.ends if graph.regions[k] == regions[0]]
