"""The equivalent of least mu_{p,inf} among all rescalings of a network.

With factors s_v put ``a_v = s_v^-p``. Every unit's incoming l_p norm is at most M if and only if
``sum_u |w_uv|^p a_u <= M^p a_v`` for every unit v, with ``a = 1`` where a unit cannot be rescaled. The
least solution is found by one damped forward pass ``a_v = M^-p sum_u |w_uv|^p a_u``, and M is feasible
if the units that cannot be rescaled meet their own inequality. The least feasible M is wanted.

Units that are tied (a class) have one ``a`` and several inequalities; it takes the largest. This is Lemma 1
of the paper for networks with biases, several outputs and paths of different lengths; where all paths have
length d and there is no bias, ``M^d = max_j phi_{p,j}``.
"""

from __future__ import annotations

import torch
from torch import nn

from pathsgd.errors import PathError
from pathsgd.geometry.balance_solver import solve_balance
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.gamma import check_p
from pathsgd.geometry.norms import group_norm
from pathsgd.geometry.rescale import apply_factors
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example, trace
from pathsgd.graph.unit_classes import unit_classes_of


def balance(model: nn.Module, example_input: Example | PathGraph | None = None, p: float = 2) -> float:
    """Rescales ``model`` in place to its equivalent of least ``mu_{p,inf}``.

    The function does not change; balancing twice changes nothing. Dead units stay as they are, and so do the
    weights that lead out of them. Units that feed a square keep their factor of 1. A network none of whose
    paths is alive stays as it is.

    Args:
        model: the module to rescale.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        p: the order of the norm, from 1 to ``math.inf``.

    Returns:
        ``mu_{p,inf}`` of the balanced model.

    Raises:
        TraceError: the model cannot be traced.
        PathError: p is invalid, a parameter is not finite, or the graph is of another model.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> _ = model[0].weight.data.fill_(8.0), model[2].weight.data.fill_(0.5)
        >>> balance(model)
        2.0
    """
    check_p(p)
    graph = trace(model, example_input)
    tensors = graph.tensors(model)
    for name in graph.parameters:
        if not bool(torch.isfinite(tensors[name]).all()):
            raise PathError(f"parameter {name!r} holds nan or inf; balance needs finite weights")
    units = unit_classes_of(graph)
    _, log_factors = solve_balance(graph, tensors, units, float(p))
    if float(log_factors.abs().max()) > _rounding(tensors):
        apply_factors(tensors, units, log_factors.exp())
    return group_norm(model, graph, p).item()


def _rounding(tensors: Tensors) -> float:
    """What the rounding of the weights makes of log s in a network that is balanced already."""
    floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
    return max(1e-9, *(64 * torch.finfo(dtype).eps for dtype in floats))
