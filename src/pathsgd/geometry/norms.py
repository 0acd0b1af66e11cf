"""Norms of a network: the path norm phi_p and the group norm mu_{p,q}."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor, nn

from pathsgd.errors import PathError
from pathsgd.geometry.captured_norm import measure_again
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat, exact_ldexp
from pathsgd.geometry.gamma import check_p
from pathsgd.geometry.operations.extended_views import apply_view
from pathsgd.geometry.passes import PoweredNetwork, Values
from pathsgd.geometry.range_check import RangeCheck
from pathsgd.geometry.unit_groups import unit_groups
from pathsgd.graph.nodes import Reshape
from pathsgd.graph.path_graph import ParameterStatus, PathGraph, compute_dtype
from pathsgd.graph.trace import Example, trace


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

    def measure(network: PoweredNetwork, check: RangeCheck | None) -> list[Tensor]:
        arithmetic, values = network.arithmetic, _forward(network, check, ends)
        if per_output:
            return [_take_root(arithmetic, value, log) for value in values]
        sums = [
            arithmetic.reduce(apply_view(Reshape((value.mantissa.numel(),)), value), [0])
            for value in values
            if value.mantissa.numel()
        ]
        if not sums:
            return [torch.tensor(-math.inf if log else 0.0, dtype=arithmetic.dtype)]
        return [_take_root(arithmetic, arithmetic.add(sums), log).reshape(())]

    found = measure_again(graph, tensors, p, (tuple(ends), per_output, log), measure)
    return found if per_output else found[0]


def _forward(network: PoweredNetwork, check: RangeCheck | None, ends: list[int]) -> list[ExtendedFloat]:
    """The path weights that arrive at ``ends``."""
    wanted = [network.folded.whole[k] for k in ends]
    values: Values = {}
    for k, value in network.join_norms().forward(wanted):
        if check is not None:
            check.see(k, value, forward=True)
        if k in wanted:
            values[k] = value
    return [values[k] for k in wanted]


def _take_root(arithmetic: Arithmetic, x: ExtendedFloat, log: bool) -> Tensor:
    """``x^(1/p)`` or its logarithm. A dead output gives 0 (or -inf) and no gradient instead of NaN."""
    x = arithmetic.normalise_deferred(x)
    alive = x.mantissa != 0  # a nan is not dead
    base = torch.where(alive, x.mantissa, 1)
    if log:
        # In fp64: a deep network's logarithm has more digits than fp32 holds.
        value = base.double().log() / arithmetic.order
        if x.exponent is not None:
            # Integer times float would be rounded to torch's default dtype.
            value = value + torch.where(alive, x.exponent, 0).to(value.dtype) * math.log(2)
        return torch.where(alive, value, -math.inf)
    value = arithmetic.root(base)
    if x.exponent is not None:
        value = exact_ldexp(value, torch.where(alive, x.exponent, 0))
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


def group_norm(
    model: nn.Module, example_input: Example | PathGraph | None = None, p: float = 2, q: float = math.inf
) -> Tensor:
    """The group norm ``mu_{p,q}(w) = (sum over units (sum over incoming |w|^p)^(q/p))^(1/q)``,
    differentiable.

    A convolution's channel is one unit, a recurrent unit is one unit at all times, a batch norm's affine
    output is a unit, and biases are incoming weights. Fixed edges do not count.

    Args:
        model: the module to measure.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        p: the order of the norm over the weights into a unit, from 1 to ``math.inf``.
        q: the order of the norm over units, from 1 to ``math.inf``.

    Returns:
        A tensor of one number.

    Raises:
        TraceError: the model cannot be traced.
        PathError: p or q is invalid, or the graph is of another model.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> _ = model[0].weight.data.copy_(torch.tensor([[3.0, 4.0]])), model[2].weight.data.fill_(0.5)
        >>> group_norm(model).item()
        5.0
    """
    check_p(p)
    if not q >= 1:
        raise PathError(f"Invalid q: {q} (group norms need 1 <= q <= inf)")
    graph = trace(model, example_input)
    tensors = graph.tensors(model)
    norms = unit_norms(graph, tensors, p)
    if not norms.numel():
        return norms.new_zeros(())
    return torch.linalg.vector_norm(norms, ord=q)


def _row_norms(rows: Tensor, p: float) -> Tensor:
    """l_p norms of rows, divided by their largest entry first so that no power leaves the range of floats."""
    if not rows.shape[1]:
        return rows.new_zeros(len(rows))
    largest = rows.detach().abs().amax(1, keepdim=True)
    largest = torch.where(largest == 0, 1, largest)
    return largest[:, 0] * torch.linalg.vector_norm(rows / largest, ord=p, dim=1)


def unit_norms(graph: PathGraph, tensors: Tensors, p: float) -> Tensor:
    """The l_p norm of the incoming weights of every unit, one after the other."""
    arithmetic = Arithmetic(float(p), compute_dtype(tensors))
    norms = []
    for group in unit_groups(graph):
        weights = [part.rows(tensors, arithmetic.dtype) for part in group.parts]
        joined = torch.cat(weights, 1) if len(weights) > 1 else weights[0]
        norms.append(_row_norms(joined, p))
    return torch.cat(norms) if norms else torch.zeros(0, dtype=arithmetic.dtype)
