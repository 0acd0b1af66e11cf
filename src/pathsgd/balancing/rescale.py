"""rho: multiply what leads into a unit by c and divide what leads out of it. The function stays."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd.balancing.class_edges import ClassFactors, add_shifts
from pathsgd.errors import RescaleError
from pathsgd.graph.edge_weights import Tensors
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example, trace
from pathsgd.graph.unit_classes import FIXED, UnitClasses, unit_classes_of

Factors = (
    Mapping[tuple[str, int], float | Tensor]
    | Mapping[str, float | Tensor]
    | Mapping[str, Tensor]
    | Mapping[tuple[str, int] | str, float | Tensor]
)


def rescale(model: nn.Module, example_input: Example | PathGraph | None, factors: Factors) -> None:
    """Rescales units in place: what leads into a unit times c, what leads out of it divided by c.

    The model computes the same function. Units tied to others, as in a residual stream, are rescaled
    together: name any one of them.

    Args:
        model: the module to rescale.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        factors: ``{(owner, index): c}`` with c > 0 for unit ``index`` of the module ``owner`` (a linear
            layer's row, a convolution's or a batch norm's channel); ``{owner: vector}`` for one factor for
            each of its units; ``{owner: c}`` for one for all of them. Where a module owns several kinds of
            units (an RNN of two layers), name the parameter that leads into them instead.

    Raises:
        TraceError: the model cannot be traced.
        RescaleError: there is no such unit, it cannot be rescaled, or a weight would leave its range. The
            model is then unchanged.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> before = model(torch.ones(1, 2))
        >>> rescale(model, None, {("0", 1): 8.0})
        >>> torch.equal(model(torch.ones(1, 2)), before)
        True
    """
    if not isinstance(factors, Mapping):
        raise RescaleError(f"expected {{(owner, index): factor}}, got {type(factors).__name__}")
    graph = trace(model, example_input)
    tensors = graph.tensors(model)
    units = unit_classes_of(graph)
    by_class = torch.ones(units.count, dtype=torch.float64)
    found, terms = units.relations.terms, defaultdict(list)
    for of, *term in zip(found.of.tolist(), found.by.tolist(), found.power.tolist(), strict=True):
        terms[of].append(tuple(term))
    for key, value in factors.items():
        for unit, c in _find_classes(units, key, value):
            free, power = _find_free_class(terms, key, unit)
            by_class[free] *= c**power
    apply_factors(tensors, units, by_class)


def _find_classes(units: UnitClasses, key: Any, value: Any) -> list[tuple[int, float]]:
    """The classes one entry of ``factors`` names, with what to multiply them by."""
    owner, index = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
    if not isinstance(owner, str):
        raise RescaleError(f"a unit is named (owner, index) with the owner's name a string, not {key!r}")
    if owner not in units.owners:
        raise RescaleError(_unknown_owner(units, owner))
    classes = units.owners[owner]
    if index is None:
        vector = torch.as_tensor(value, dtype=torch.float64).flatten()
        if vector.numel() == 1:
            vector = vector.expand(classes.numel())
        if vector.numel() != classes.numel():
            raise RescaleError(
                f"{owner!r} has {classes.numel()} units but {vector.numel()} factors were given"
            )
        chosen: dict[int, float] = {}
        for k, c in zip(classes.tolist(), vector.tolist(), strict=True):
            if chosen.setdefault(k, c) != c and k != FIXED:
                raise RescaleError(f"units of {owner!r} that are tied were given different factors")
        if any(k == FIXED and c != 1 for k, c in zip(classes.tolist(), vector.tolist(), strict=True)):
            raise RescaleError(_not_rescalable(owner, None))
        pairs = [(k, c) for k, c in chosen.items() if k != FIXED]
    else:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < classes.numel():
            raise RescaleError(f"{owner!r} has units 0 to {classes.numel() - 1}; there is no unit {index!r}")
        unit = int(classes[index])
        if unit == FIXED:
            raise RescaleError(_not_rescalable(owner, index))
        pairs = [(unit, float(value))]
    for _, c in pairs:
        if not (math.isfinite(c) and c > 0):
            raise RescaleError(f"Invalid factor for {key!r}: {c} (factors are finite and over 0)")
    return pairs


def _find_free_class(terms: Mapping[int, list[tuple[int, int]]], key: Any, unit: int) -> tuple[int, float]:
    """The class to rescale for a unit to be rescaled, and by which power of its factor."""
    if len(terms[unit]) > 1:
        raise RescaleError(
            f"the factor of {key!r} is the product of those of other units: rescale one of these"
        )
    ((free, power),) = terms[unit]
    return free, 1 / power


def _unknown_owner(units: UnitClasses, owner: Any) -> str:
    inside = [name for name in units.owners if str(name).startswith(f"{owner}.")]
    if inside:
        return (
            f"{owner!r} owns several kinds of units; name one of the parameters that lead into them: "
            + ", ".join(map(repr, inside))
        )
    known = [name for name, classes in units.owners.items() if bool((classes != FIXED).any())]
    return f"there is no unit of {owner!r}; units that can be rescaled belong to {known}"


def _not_rescalable(owner: str, index: int | None) -> str:
    which = f"unit {index} of {owner!r}" if index is not None else f"a unit of {owner!r}"
    return (
        f"{which} cannot be rescaled: it is an output, or it feeds an operator that is not positively "
        "homogeneous, a normalisation by running statistics, or a weight that is fixed or computed; "
        "rescale a unit before it"
    )


@torch.no_grad()
def apply_factors(tensors: Tensors, units: UnitClasses, factors: Tensor) -> None:
    """Multiplies every parameter entry by ``s[head] / s[tail]``, on the same Parameters, given s of free
    classes.

    Checked first, applied after: if a result would not be finite, nothing has changed.
    """
    factors = factors.clone()
    factors[FIXED] = 1
    mantissa, exponent = torch.frexp(factors)
    by_class = ClassFactors(mantissa, exponent.long()).complete(units.relations)
    factors = by_class.mantissa.log2() + by_class.exponent
    updates = []
    acting = add_shifts(tensors, units.shifts)
    for name, edge in units.parameters.items():
        if bool((factors[edge.head] == 0).all()) and bool((factors[edge.tail] == 0).all()):
            continue
        updated = acting[name].detach().clone()
        by_class.scale_(updated, edge)
        tiny = torch.finfo(updated.dtype).tiny
        lost = (updated.abs() < tiny) & (acting[name].abs() >= tiny)
        if bool(lost.any()) or not bool(torch.isfinite(updated[torch.isfinite(tensors[name])]).all()):
            raise RescaleError(
                f"the factors take parameter {name!r} out of the range of {tensors[name].dtype}; "
                "use smaller ones"
            )
        updates.append((tensors[name], updated - units.shifts.get(name, 0)))
    for parameter, updated in updates:
        parameter.copy_(updated)


def name_factors(units: UnitClasses, factors: Tensor) -> dict[str, Tensor]:
    """Factors of classes as :func:`rescale` takes them, each class under one owner: a module, or else a
    parameter."""
    covered = ~units.relations.is_free
    named: dict[str, Tensor] = {}
    modules = [name for name in units.owners if name not in units.parameters]
    for name in (*modules, *units.parameters):
        classes = units.owners.get(name)
        if classes is None or bool(covered[classes].all()):
            continue
        named[name] = torch.where(covered[classes], 1.0, factors[classes])
        covered[classes] = True
    return named


def unbalance(
    model: nn.Module,
    example_input: Example | PathGraph | None = None,
    *,
    units: int | None = None,
    factor: float = 10.0,
    sigma: float = 1.0,
    powers_of_two: bool = False,
    generator: torch.Generator | None = None,
) -> None:
    """The paper's random rescaling, in place: picks units and rescales each by ``factor`` times a log-normal
    number.

    Args:
        model: the module to rescale.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        units: how many hidden units are picked, with replacement; by default a quarter of those that can be
            rescaled, the paper's 2000 of 8000.
        factor: what every unit picked is multiplied by in any case.
        sigma: the standard deviation of the logarithm of the random part.
        powers_of_two: takes every unit's factor to the nearest power of two. Then no weight is rounded, and
            what is invariant stays so to the last bit.
        generator: of the random numbers; torch's own by default.

    Raises:
        TraceError: the model cannot be traced.
        RescaleError: an argument is invalid, no unit can be rescaled, or a weight would leave its range.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> before = model(torch.ones(1, 2))
        >>> unbalance(model, powers_of_two=True)
        >>> torch.equal(model(torch.ones(1, 2)), before)
        True
    """
    graph = trace(model, example_input)
    tensors = graph.tensors(model)
    classes = unit_classes_of(graph)
    hidden = len(classes.free)
    picks = max(1, hidden // 4) if units is None else units
    if picks < 0:
        raise RescaleError(f"Invalid number of units: {picks}")
    if not sigma >= 0:
        raise RescaleError(f"Invalid sigma: {sigma}")
    if not (math.isfinite(factor) and factor > 0):
        raise RescaleError(f"Invalid factor: {factor}")
    if hidden == 0 and picks:
        raise RescaleError(
            f"{graph.model} has no unit that can be rescaled; print(trace(model, ...)) says why"
        )
    if not picks:
        return
    device = generator.device if generator is not None else torch.device("cpu")
    chosen = classes.free[torch.randint(hidden, (picks,), generator=generator, device=device).cpu()]
    drawn = torch.randn(picks, generator=generator, dtype=torch.float64, device=device).cpu()
    logarithms = torch.zeros(classes.count, dtype=torch.float64)
    logarithms.index_add_(0, chosen, math.log(factor) + sigma * drawn)
    factors = (logarithms / math.log(2)).round().exp2() if powers_of_two else logarithms.exp()
    apply_factors(tensors, classes, factors)
