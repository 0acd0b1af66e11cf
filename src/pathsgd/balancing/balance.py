"""balance: the equivalent of least mu_{p,q} among all rescalings of a network, in place.

    mu_{p,q}(w) = (sum over units (sum over incoming |w|^p)^(q/p))^(1/q)

For finite p and q the minimum is unique (:mod:`pathsgd.balancing.least_mu`). Two networks that are rescalings
of each other are one network after it, so every optimizer trains them alike. For q = inf it is Lemma 1 of the
paper (:mod:`pathsgd.balancing.lemma1`), whose minimum is not unique.

The gains of norms are an exception, since they are initialised as 1 beside matrices of any size: least mu
would shrink a Llama's to 0.4 and make the matrices behind them 2.5 times as large, which AdamW at its usual
rate would move 2.5 times less. So one factor for all units behind a norm brings the mean gain to 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pathsgd.balancing.class_edges import ClassFactors, Norms, add_shifts, at_rows, in_double, raise_to
from pathsgd.balancing.group_norm import group_norm
from pathsgd.balancing.least_mu import find_least_mu
from pathsgd.balancing.lemma1 import solve_balance
from pathsgd.balancing.rescale import apply_factors
from pathsgd.errors import PathError, check_p
from pathsgd.graph.nodes import Multiply, Source
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example, trace
from pathsgd.graph.unit_classes import FIXED, EdgeClasses, UnitClasses, unit_classes_of
from pathsgd.graph.unit_groups import find_unit_groups
from pathsgd.graph.unit_relations import Relations
from pathsgd.sharding import local_part, reduce_over_ranks, shards_of


@torch.no_grad()
def balance(
    model: nn.Module,
    example_input: Example | PathGraph | None = None,
    p: float = 2,
    q: float = 2,
    *,
    unit_gains: bool = True,
    fixed: Collection[str] = (),
) -> float:
    """Rescales ``model`` in place to its equivalent of least ``mu_{p,q}``. The function does not change.

    Call it once before training, and no optimizer feels how the start was scaled: rescaled copies of a
    network are the same network afterwards, those rescaled by powers of two to the last bit. With p = q = 2
    that is the equivalent of least sum of squares, in which what leads into a unit has the same norm as what
    leads out of it, as about in usual initialisations. But the mean gain of every norm is 1, as in these.

    ``mu`` counts every stored parameter once, and no running statistics: of a batch norm its weight and its
    bias. (:func:`pathsgd.group_norm` has them as they act, weight / sigma.) A gain that is stored without its
    1, as Gemma's, counts with it. Frozen parameters are rescaled, too. Parameters of 16 bits are rescaled by
    powers of two alone, so that none is rounded. A unit before or behind zeros has no minimum; its other side
    is brought to the norm of its layer, or to 1. A unit keeps at least 2^-20 of the norm of its layer.

    For ``q = math.inf`` it is Lemma 1 of the paper, and gains are weights like others. Many equivalents have
    the least ``mu_{p,inf}``; of these it takes the one in which the weights into all units before the last
    have the norm mu, as far as they can, dead units stay as they are, and units that feed a product or a
    square keep their factor of 1.

    Args:
        model: the module to rescale. If it is sharded over ranks, call this on all of them.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        p: the order of the norm over the weights into a unit, from 1 to ``math.inf``.
        q: the order of the norm over units, from 1 to ``math.inf``; p is finite if q is.
        unit_gains: brings the mean gain of every norm to 1, for finite q. Without, gains are weights like
            others, and mu is the least of all: to prune by magnitude over several layers.
        fixed: names of parameters that stay as they are, for finite q, and with them the units that they lead
            into or out of. Of adapters that are saved without their base, those of the base.

    Returns:
        ``mu_{p,q}`` of the balanced model; for ``q = math.inf`` its :func:`pathsgd.group_norm`.

    Raises:
        TraceError: the model cannot be traced.
        PathError: p, q or a name is invalid, a parameter is not finite, or the graph is of another model.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> _ = model[0].weight.data.fill_(8.0), model[2].weight.data.fill_(0.5)
        >>> _ = balance(model)
        >>> model[0].weight.item(), model[2].weight.item()
        (2.0, 2.0)
    """
    check_orders(p, q)
    graph = trace(model, example_input)
    tensors = graph.tensors(model, sharded=not math.isinf(q))
    check_finite(graph.parameters, tensors)
    units = unit_classes_of(graph)
    if unknown := set(fixed) - set(graph.parameters):
        raise PathError(f"there is no parameter {min(unknown)!r}")
    if units.count == 1:  # FIXED alone
        warnings.warn(
            f"no unit of {graph.model} can be rescaled, so balance changes nothing: "
            "print(pathsgd.trace(model, example_input)) says why",
            stacklevel=3,
        )
    if fixed and math.isinf(q):
        raise PathError("fixed needs a finite q: Lemma 1 is about all weights into a unit")
    if math.isinf(q):
        _, log_factors = solve_balance(graph, tensors, units, float(p))
        if float(log_factors.abs().max()) > _rounding(tensors.values()):
            apply_factors(tensors, units, log_factors.exp())
        return group_norm(model, graph, p).item()
    rows = None if p == q else find_rows(graph)
    acting = add_shifts({name: tensors[name] for name in units.parameters}, units.shifts)
    norms = find_norms(graph) if unit_gains else None
    factors = find_balancing_factors(acting, units, p, q, rows, find_held(units, fixed), norms)
    for name, edge in units.parameters.items():
        factors.scale_(acting[name], edge)
    for name, shift in units.shifts.items():
        tensors[name].copy_(acting[name] - shift)
    return measure_mu(acting, p, q, rows)


def check_orders(p: float, q: float) -> None:
    check_p(p)
    if not q >= 1:
        raise PathError(f"Invalid q: {q} (group norms need 1 <= q <= inf)")
    if math.isinf(p) and not math.isinf(q):
        raise PathError("p = inf needs q = inf: for finite q there is no single minimum")


def check_finite(names: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
    """Refuses nan and inf, by the name of their parameter: on all ranks, if one of them holds it."""
    chosen = {name: tensors[name] for name in names}
    bad = [float(not _is_finite(local_part(t).detach())) for t in chosen.values()]
    shards = [shards_of(t) for t in chosen.values()]
    on_gpu = any(dist.get_backend(shard.group) == "nccl" for own in shards for shard in own)
    flags = reduce_over_ranks(torch.tensor(bad, device="cuda" if on_gpu else "cpu"), shards, largest=True)
    for name, is_bad in zip(chosen, flags.tolist(), strict=True):
        if is_bad:
            raise PathError(f"parameter {name!r} holds nan or inf; balance needs finite weights")


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.numel() or all(map(math.isfinite, tensor.aminmax()))


def find_held(units: UnitClasses, fixed: Iterable[str]) -> Tensor:
    """Whether a class stays as it is, since it leads into or out of one of these parameters; by class."""
    held = torch.zeros(units.count, dtype=torch.bool)
    held[FIXED] = True
    for name in fixed:
        if edge := units.parameters.get(name):
            held[edge.head.flatten()] = held[edge.tail.flatten()] = True
    return units.relations.hold(held)


def find_exact(
    tensors: Mapping[str, Tensor], edges: Mapping[str, EdgeClasses], relations: Relations
) -> Tensor:
    """Whether a class is rescaled by powers of two alone, since a parameter of 16 bits would be rounded; by
    class."""
    exact = torch.zeros(relations.count, dtype=torch.bool)
    for name, edge in edges.items():
        if name in tensors and tensors[name].element_size() < 4:
            exact[edge.head.flatten()] = exact[edge.tail.flatten()] = True
    exact[relations.derived.by[exact[relations.derived.of]]] = True
    return exact


def find_balancing_factors(
    tensors: Mapping[str, Tensor],
    units: UnitClasses,
    p: float = 2,
    q: float = 2,
    rows: Mapping[str, Tensor] | None = None,
    held: Tensor | None = None,
    norms: Norms | None = None,
) -> ClassFactors:
    """The factors that lead to least mu_{p,q}: powers of two where a parameter has 16 bits, and where the
    network is balanced up to these already.

    Args:
        tensors: the parameters; those of other optimizers may be left out.
        units: their classes.
        p: as in :func:`balance`.
        q: as in :func:`balance`.
        rows: of :func:`find_rows`, if p and q differ.
        held: by class, whether it is to stay as it is.
        norms: of :func:`find_norms`, if the mean gain of each is to be 1.
    """
    edges = {name: edge for name, edge in units.parameters.items() if name in tensors}
    held = find_held(units, ()) if held is None else held
    factors = find_least_mu(tensors, edges, units.relations, held, float(p), float(q), rows, norms)
    exact = find_exact(tensors, edges, units.relations)
    mantissa = torch.where(exact, 1.0, factors.mantissa)
    if float(mantissa.log().abs().max()) <= _rounding(tensors[name] for name in edges):
        mantissa = torch.ones_like(mantissa)
    return ClassFactors(mantissa, factors.exponent).complete(units.relations)


def _rounding(tensors: Iterable[Tensor]) -> float:
    """The size of log s that the rounding of the weights causes in a network that is balanced already."""
    floats = {t.dtype for t in tensors if t.is_floating_point()}
    return max(1e-9, *(64 * torch.finfo(dtype).eps for dtype in floats if dtype.itemsize > 2), 0.0)


def find_norms(graph: PathGraph) -> Norms:
    """The norms whose gains, and biases, are all that leads into their units. Gains are what multiplies
    values that cannot be rescaled; norms that share units are one."""
    units = unit_classes_of(graph)
    uses: dict[str, set[type]] = {}
    for k, weight in graph.weights():
        if weight.parameter is not None:
            uses.setdefault(weight.parameter.name, set()).add(type(graph.nodes[k].operation))
    gains: dict[str, Tensor] = {}
    others = units.relations.related.clone()
    others[FIXED] = True
    for name, edge in units.parameters.items():
        heads, tails = torch.broadcast_tensors(edge.head, edge.tail)
        moved = heads != tails  # not the slopes of a PReLU
        if not uses[name] <= {Multiply, Source} or bool((tails[moved] != FIXED).any()):
            others[heads[moved]] = True
        elif Multiply in uses[name]:
            gains[name] = heads[moved]
    number = torch.zeros(units.count, dtype=torch.int64)
    for k, heads in enumerate(gains.values(), 1):
        heads = heads[~others[heads]]
        joined = number[heads].unique()
        number[torch.isin(number, joined[joined > 0])] = k
        number[heads] = k
    return Norms(number, gains.keys())


def find_rows(graph: PathGraph) -> dict[str, Tensor]:
    """The number of the unit that each entry of a parameter leads into, by parameter; one for several units
    that share a weight."""
    found: dict[str, Tensor] = {}
    start = 1
    for group in find_unit_groups(graph):
        count = math.prod(group.parts[0].units)
        for part in group.parts:
            parameter = part.operation.weight.parameter
            assert parameter is not None
            if parameter.name in found:
                continue
            shape = graph.parameters[parameter.name].shape
            entries, spread = part.entries(shape), part.row_of_unit()
            units = torch.arange(count)
            if spread is not None:  # the first of the units that share a row
                units = torch.full((len(entries),), count).scatter_reduce(0, spread, units, "amin")
            rows = torch.zeros(math.prod(shape), dtype=torch.int64)
            rows[entries.flatten()] = start + units[:, None].expand(entries.shape).flatten()
            found[parameter.name] = rows.reshape(shape)
        start += count
    for name, edge in unit_classes_of(graph).parameters.items():
        if name not in found:  # a unit of its own, where it is used as no incoming weight
            found[name] = start + torch.arange(edge.head.numel()).reshape(edge.head.shape)
            start += edge.head.numel()
    return found


def measure_mu(tensors: Mapping[str, Tensor], p: float, q: float, rows: Mapping[str, Tensor] | None) -> float:
    """``mu_{p,q}`` of stored parameters; ``rows`` is needed if p and q differ. A collective call if they are
    sharded."""
    # Sharded ones are gathered one at a time: all of them may not fit.
    ends = (x for tensor in tensors.values() if tensor.numel() for x in _whole(tensor).aminmax())
    largest = max((abs(float(x)) for x in ends), default=0.0)
    scale = math.ldexp(1, min(-math.frexp(largest)[1], 1000))  # powers may be out of range
    units = rows if rows is not None and p != q else {}
    sums = torch.zeros(1 + max((int(own.max()) for own in units.values()), default=0), dtype=torch.float64)
    for name, tensor in tensors.items():
        for place, x in in_double(_whole(tensor)):
            powers = raise_to(x.mul_(scale), p)
            if units:
                index = at_rows(torch.atleast_1d(units[name]), place).expand(x.shape)
                sums.index_add_(0, index.flatten(), powers.flatten().cpu())
            else:
                sums += powers.sum().cpu()
    return float(sums.pow(q / p).sum() ** (1 / q)) / scale


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return torch.atleast_1d(whole.detach())
