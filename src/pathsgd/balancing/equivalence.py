"""Are two networks the same up to rescaling? If so, by which factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pathsgd.balancing.class_edges import ClassFactors, add_shifts
from pathsgd.balancing.rescale import name_factors
from pathsgd.errors import PathError
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example, trace
from pathsgd.graph.unit_classes import FIXED, EdgeClasses, unit_classes_of
from pathsgd.graph.unit_relations import Relations, Terms


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
    a, b = add_shifts(a, units.shifts), add_shifts(b, units.shifts)
    fixed = torch.zeros(units.count, dtype=torch.bool)
    fixed[FIXED] = True
    changes = {
        name: _compare(edge, a[name], b[name], abs(units.shifts.get(name, 0)))
        for name, edge in units.parameters.items()
    }
    factors = read_factors(join_changes(list(changes.values())), units.relations, fixed)
    for name, edge in units.parameters.items():
        if factors is None:  # it is where signs or zeros have changed
            differs = read_factors(changes[name], units.relations, torch.ones_like(fixed)) is None
        else:
            bound = rtol if rtol is not None else 64 * torch.finfo(a[name].dtype).eps
            expected = a[name].to(torch.float64, copy=True)
            factors.scale_(expected, edge)
            size = b[name].double().abs().clamp(min=abs(units.shifts.get(name, 0)))
            differs = bool(((expected - b[name].double()).abs() > bound * size).any())
        if differs:
            return Equivalence(False, reason=f"no factors turn {name!r} of one into the other's")
    assert factors is not None
    return Equivalence(True, name_factors(units, factors.mantissa * torch.exp2(factors.exponent.double())))


class Changes(NamedTuple):
    """Entries of parameters, by the classes they lead to and come from, before and after."""

    heads: Tensor
    tails: Tensor
    before: Tensor
    after: Tensor
    shifts: Tensor
    """What the network adds to an entry, as 1 to a gain: before and after have digits relative to that."""


def join_changes(parts: Sequence[Changes]) -> Changes:
    return Changes(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _compare(edge: EdgeClasses, a: Tensor, b: Tensor, shift: float = 0.0) -> Changes:
    head, tail = (ids.expand(a.shape).flatten() for ids in (edge.head, edge.tail))
    before, after = (x.flatten().cpu().double() for x in (a, b))
    return Changes(head, tail, before, after, torch.full_like(before, shift))


def read_factors(changes: Changes, relations: Relations, held: Tensor) -> ClassFactors | None:
    """The factors of classes that take entries from before to after, each read off the largest entry that
    leads from or to a class which is known already: at first those that are held. None if signs or zeros have
    changed, or if there is nan or inf.
    """
    heads, tails, before, after, shifts = changes
    if bool((before.sign() != after.sign()).any()) or not bool(torch.isfinite(before - after).all()):
        return None
    usable = before != 0
    mantissa, exponent = torch.frexp(torch.where(usable, after / torch.where(usable, before, 1), 1))
    factors = ClassFactors(
        torch.ones(len(held), dtype=torch.float64), torch.zeros(len(held), dtype=torch.int64)
    )
    known = relations.hold(held)
    exact = usable & (shifts == 0)  # the others only where these do not lead
    ways = [(among, *ends) for among in (exact, usable) for ends in ((heads, tails), (tails, heads))]
    while not bool(known.all()):
        for among, targets, sources in ways:
            reached = among & known[sources] & ~known[targets]
            wanted = torch.zeros_like(known)
            wanted[targets[reached]] = True
            last = relations.find_last(wanted, known)
            if len(last.of):
                break
        else:
            # Nothing ties it to a known one: its factor changes no weight.
            known[int((~known & relations.is_free).nonzero()[0])] = True
            known = relations.cover(known)
            continue
        size = torch.where(reached, before.abs(), -1)
        best = size.new_full((len(held),), -1).scatter_reduce(0, targets, size, "amax")
        chosen = (reached & (size == best[targets])).nonzero().flatten()
        at_targets = ClassFactors(torch.ones_like(factors.mantissa), torch.zeros_like(factors.exponent))
        sign = 1 if targets is heads else -1
        source = sources[chosen]
        at_targets.mantissa[targets[chosen]] = factors.mantissa[source] * mantissa[chosen] ** sign
        at_targets.exponent[targets[chosen]] = factors.exponent[source] + sign * exponent[chosen].long()
        found = _take_root(at_targets, factors, last)
        factors.mantissa[last.by], factors.exponent[last.by] = found.mantissa, found.exponent
        known[last.by] = True
        known = relations.cover(known)
        factors = factors.complete(relations)
    return factors


def _take_root(products: ClassFactors, factors: ClassFactors, last: Terms) -> ClassFactors:
    """The factors of the last terms of these products, all others of which are known; unknown ones are 1."""
    mantissa = products.mantissa[last.of] / factors.mantissa[last.of]
    exponent = products.exponent[last.of] - factors.exponent[last.of]
    whole = torch.div(exponent, last.power, rounding_mode="floor")
    rest = torch.exp2((exponent - whole * last.power).double())  # the root of an even power of two is one
    mantissa, shift = torch.frexp((mantissa * rest) ** (1 / last.power))
    return ClassFactors(mantissa, whole + shift)


def agree(factors: ClassFactors, changes: Changes, tolerance: float) -> bool:
    """Whether these factors take all entries from before to after."""
    heads, tails, before, after, shifts = changes
    log = factors.mantissa.log2() + factors.exponent
    change = torch.where(before != 0, (after / torch.where(before != 0, before, 1)).log2(), 0)
    expected = torch.where(before != 0, log[heads] - log[tails], 0)
    rounding = tolerance * (1 + log.abs().max())
    is_near = (before * expected.exp2() - after).abs() <= rounding * shifts
    return bool((((change - expected).abs() <= rounding) | is_near).all())
