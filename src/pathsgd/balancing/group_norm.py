"""The group norm mu_{p,q}: an l_q norm over units of the l_p norms of their incoming weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pathsgd.errors import PathError, check_p
from pathsgd.graph.edge_weights import Tensors
from pathsgd.graph.path_graph import PathGraph, compute_dtype
from pathsgd.graph.trace import Example, trace
from pathsgd.graph.unit_groups import find_unit_groups


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
    norms = measure_unit_norms(graph, tensors, p)
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


def measure_unit_norms(graph: PathGraph, tensors: Tensors, p: float) -> Tensor:
    """The l_p norm of the incoming weights of every unit, one after the other."""
    dtype = compute_dtype(tensors)
    norms = []
    for group in find_unit_groups(graph):
        weights = [part.rows(tensors, dtype) for part in group.parts]
        joined = torch.cat(weights, 1) if len(weights) > 1 else weights[0]
        norms.append(_row_norms(joined, p))
    return torch.cat(norms) if norms else torch.zeros(0, dtype=dtype)
