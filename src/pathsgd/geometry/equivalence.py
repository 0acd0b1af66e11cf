"""Are two networks the same up to rescaling? If so, by which scales."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pathsgd.errors import PathError
from pathsgd.geometry.rescale import name_factors, rescale_parameter
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example, trace
from pathsgd.graph.unit_classes import FIXED, EdgeClasses, UnitClasses, unit_classes_of


@dataclass(frozen=True)
class Equivalence:
    """True if the networks are rescaling equivalent, with the scales that prove it or why not.

    ``factors`` can be given to :func:`pathsgd.rescale` to turn the first network into the second.
    """

    equivalent: bool
    factors: dict[str, Tensor] = field(default_factory=dict)
    reason: str = ""

    def __bool__(self) -> bool:
        return self.equivalent


@torch.no_grad()
def rescaling_equivalent(
    model_a: nn.Module,
    model_b: nn.Module,
    example_input: Example | PathGraph | None = None,
    *,
    rtol: float | None = None,
) -> Equivalence:
    """Whether scales exist that turn ``model_a`` into ``model_b``.

    ``rtol`` bounds the relative difference of each weight; by default some roundings of its dtype.

    >>> a = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> b = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> _ = a[0].weight.data.fill_(2.0), a[2].weight.data.fill_(3.0)
    >>> _ = b[0].weight.data.fill_(8.0), b[2].weight.data.fill_(0.75)
    >>> found = rescaling_equivalent(a, b)
    >>> bool(found), found.factors["0"].tolist()
    (True, [4.0])
    """
    if not isinstance(model_b, nn.Module):
        raise PathError(f"expected two models, got {type(model_b).__name__} for the second")
    graph = trace(model_a, example_input)
    units = unit_classes_of(graph)
    a = graph.tensors(model_a)
    try:
        b = graph.tensors(model_b)
    except PathError as error:
        found = str(error).split(";")[0]
        return Equivalence(False, reason=f"the models differ in structure: {found}")
    for name in a:
        if name not in units.parameters and not torch.equal(a[name], b[name].to(a[name])):
            return Equivalence(False, reason=f"{name!r} differs, and no rescaling changes it")
    logarithms = _propagate(units, a, b)
    factors = logarithms.exp()
    for name, edge in units.parameters.items():
        bound = rtol if rtol is not None else 64 * torch.finfo(a[name].dtype).eps
        expected = rescale_parameter(a[name].double(), edge, factors)
        difference = (expected - b[name].double()).abs()
        if bool((difference > bound * b[name].double().abs()).any()):
            return Equivalence(False, reason=f"no scales turn {name!r} of one into the other's")
    return Equivalence(True, name_factors(units, factors))


def _propagate(units: UnitClasses, a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    """log s of every class, read off one weight each, outward from the classes that are known.

    ``log|b/a| = log s_head - degree * log s_tail`` on every edge; the largest weight with a known end
    says most about the other end.
    """
    value = torch.zeros(units.count, dtype=torch.float64)
    known = torch.zeros(units.count, dtype=torch.bool)
    known[FIXED] = True
    edges = []
    for name, edge in units.parameters.items():
        x, y = a[name].double().cpu(), b[name].double().cpu()
        usable = (x != 0) & (y != 0)
        ratio = torch.where(usable, (y / torch.where(usable, x, 1)).abs(), 1).log()
        size = torch.where(usable, x.abs(), -math.inf)
        edges.append((ratio, size, edge))
    while True:
        progress = False
        for ratio, size, edge in edges:
            progress |= _step(ratio, size, edge, value, known)
        if progress:
            continue
        unknown = (~known).nonzero().flatten()
        if not len(unknown):
            return value
        # Nothing ties this class to a known one: any scale will do.
        known[unknown[0]] = True


def _step(ratio: Tensor, size: Tensor, edge: EdgeClasses, value: Tensor, known: Tensor) -> bool:
    """Learns heads from known tails and tails from known heads along one parameter."""
    head, tail = edge.head.expand(ratio.shape), edge.tail.expand(ratio.shape)
    progress = False
    for target, source, estimate in (
        (head, tail, ratio + edge.degree * value[tail]),
        (tail, head, (value[head] - ratio) / edge.degree),
    ):
        useful = known[source] & ~known[target] & torch.isfinite(size)
        if not bool(useful.any()):
            continue
        classes, sizes, estimates = target[useful], size[useful], estimate[useful]
        best = torch.full_like(value, -math.inf)
        best.scatter_reduce_(0, classes, sizes, "amax")
        chosen = sizes == best[classes]
        value[classes[chosen]] = estimates[chosen]
        known[classes[chosen]] = True
        progress = True
    return progress
