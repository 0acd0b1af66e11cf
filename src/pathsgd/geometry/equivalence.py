"""Are two networks the same up to rescaling? If so, by which factors."""

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
    """Whether two networks are rescaling equivalent; true or false in a condition.

    Attributes:
        equivalent: whether they are.
        factors: what turns the first into the second, for :func:`pathsgd.rescale`.
        reason: why they are not.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> found = rescaling_equivalent(model, nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)))
        >>> bool(found), found.reason.split(":")[0]
        (False, 'the models differ in structure')
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
    """Whether a rescaling turns ``model_a`` into ``model_b``.

    Args:
        model_a: the first module.
        model_b: the second, of the same structure.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the first.
        rtol: the largest relative difference of a weight; by default some roundings of its dtype.

    Returns:
        An :class:`Equivalence`: true with the factors that prove it, or false with the reason.

    Raises:
        TraceError: the first model cannot be traced.
        PathError: the second is no module, or the graph is of another model.

    Example:
        >>> a, b = (
        ...     nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        ...     for _ in "ab"
        ... )
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
            return Equivalence(False, reason=f"no factors turn {name!r} of one into the other's")
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
        # Nothing ties this class to a known one: its factor is free.
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
