"""Weights that stand several times on one path: how often, and what that does to gamma.

Let f be the powered network as a function of one shared weight's power a, and k the number of times a
path uses it. Where k <= 1 on every path (convolutions included) there is one gamma. Elsewhere there are
three candidates, all of them equivariant; they weigh a path through the weight

- by k: ``kappa1 = f'``, what Algorithm 1 gives and the default;
- by k^2: ``gram = f' + a f''``, at p = 2 the diagonal of the Gram matrix of the path map;
- by k (2k - 1): ``hessian = f' + 2 a f''``, at p = 2 half the diagonal of the Hessian of phi^2.

``a f'' / f'`` does not change under rescaling: it is the mean of k - 1 over the uses of the weight, between 0
and the longest path. Each entry needs a pass of its own, so the other two are for small recurrent nets.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from pathsgd.errors import PathError
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.extended_float import Arithmetic
from pathsgd.geometry.passes import powered_network
from pathsgd.graph.nodes import Square, Weighted
from pathsgd.graph.path_graph import PathGraph

Shared = Literal["kappa1", "gram", "hessian"]

ENTRIES_AT_ONCE = 1 << 22
"""Numbers in one batch of perturbed copies of a parameter: it bounds the memory."""


def check_shared(shared: object, p: float) -> Shared:
    """The choice for shared weights, checked."""
    if shared not in get_args(Shared):
        raise PathError(f"Invalid shared: {shared!r} (one of {', '.join(map(repr, get_args(Shared)))})")
    if shared != "kappa1" and math.isinf(p):
        raise PathError(f"shared={shared!r} is a second derivative and p = inf has none; use 'kappa1'")
    return shared  # type: ignore[return-value]


def shared_corrections(graph: PathGraph, tensors: Tensors, p: float, shared: Shared) -> dict[str, Tensor]:
    """What kappa1 is to be multiplied by, for the parameters that some path uses more than once."""
    slope = {"kappa1": 0, "gram": 1, "hessian": 2}[shared]
    if not slope:
        return {}
    return {name: 1 + slope * measure_further_uses(graph, tensors, p, name) for name in find_repeated(graph)}


def find_repeated(graph: PathGraph) -> list[str]:
    """The path-normalised parameters that some path uses more than once. Two paths meet in a square."""
    upstream: list[frozenset[str]] = []
    found: set[str] = set()
    for node in graph.nodes:
        before = frozenset().union(*(upstream[source] for source in node.inputs))
        operation = node.operation
        if isinstance(operation, Square):
            found |= before
        if isinstance(operation, Weighted) and operation.weight.parameter is not None:
            name = operation.weight.parameter.name
            found |= before & {name}
            before |= {name}
        upstream.append(before)
    return [name for name, info in graph.parameters.items() if name in found and info.normalised]


def measure_further_uses(graph: PathGraph, tensors: Tensors, p: float, name: str) -> Tensor:
    """``a f'' / f'`` of every entry of a parameter; 0 on dead entries, where f' is all there is.

    With ``a v`` in place of a, the derivatives of f with respect to v at 1 are ``a f'`` and ``a^2 f''``.
    In fp64, whose range is that of paths some eight times as long as fp32's.
    """
    double = {
        key: tensor.detach().double() if tensor.is_floating_point() else tensor
        for key, tensor in tensors.items()
    }
    weight = double[name]
    with torch.enable_grad():
        v = torch.ones_like(weight).requires_grad_()
        powered = powered_network(graph, {**double, name: weight * Arithmetic(p, v.dtype).root(v)}, p)
        ends = [
            value.mantissa.sum()
            for k, value in powered.forward(powered.graph.ends)
            if k in powered.graph.ends
        ]
        f = torch.stack(ends).sum()
        (slopes,) = torch.autograd.grad(f, v, create_graph=True)
        curvatures = _diagonal(slopes, v)
    if not bool(torch.isfinite(curvatures).all()):
        raise PathError(
            f"the paths through {name!r} leave the range of fp64, so their uses of it cannot be counted; "
            "use shared='kappa1', which has no such limit"
        )
    slopes = slopes.detach()
    ratio = torch.where(slopes > 0, curvatures / torch.where(slopes > 0, slopes, 1), 0)
    return ratio.clamp(min=0)


def _diagonal(slopes: Tensor, v: Tensor) -> Tensor:
    """The diagonal of the Hessian, given the gradient: one backward pass for each entry, many at once."""
    count = v.numel()
    step = max(ENTRIES_AT_ONCE // max(count, 1), 1)
    found = []
    for entries in torch.arange(count, device=v.device).split(step):
        seeds = torch.zeros(len(entries), count, dtype=v.dtype, device=v.device)
        seeds[torch.arange(len(entries), device=v.device), entries] = 1
        (rows,) = torch.autograd.grad(
            slopes, v, seeds.reshape(-1, *v.shape), retain_graph=True, is_grads_batched=True
        )
        found.append(rows.reshape(len(entries), count).gather(1, entries[:, None]))
    return torch.cat(found).reshape(v.shape)
