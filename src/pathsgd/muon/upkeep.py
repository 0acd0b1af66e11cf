"""Keeps a network balanced while it is trained.

Relative steps do not hold the scale of a unit, so every few steps units are moved towards the balance again,
by one round: what leads into each and what leads out of it get closer in norm. State follows the weights.

A rescaling by others is undone, since balancing again would not: one round a step lags the minimum a little.
For that one entry of every row and column of every parameter is remembered, with its value. Of sharded
parameters none is: what others rescaled is balanced, but state, which is of the weights before, stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pathsgd._torch import Version, is_capturing
from pathsgd.balancing.balance import check_finite, find_balancing_factors, find_exact, find_held
from pathsgd.balancing.class_edges import ClassFactors
from pathsgd.balancing.equivalence import Changes, agree, join_changes, read_factors
from pathsgd.errors import PathError
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.unit_classes import FIXED, EdgeClasses, unit_classes_of
from pathsgd.muon.round import POWERS, Round
from pathsgd.sharding import is_sharded, local_part
from pathsgd.training.capture import has_triton
from pathsgd.training.staleness import ModelTensors, find_versions

if TYPE_CHECKING:
    from pathsgd.muon.gpu.upkeep import KernelGather, KernelUpkeep

STEPS = "upkeep_steps"
"""In the groups, so that it is saved with them."""
REFERENCE = ("reference_index", "reference_value")
"""In the state of a parameter: the entries that are remembered. They are there after its first step only:
torch.distributed.checkpoint takes one step to make the state, if there is none at all."""


class Upkeep:
    """The balance of one model.

    Args:
        graph: of the model.
        tensors: of the model.
        owned: the parameters that the optimizer has, by name. Units that lead into or out of any others, or
            of frozen ones, stay as they are.
        state: the optimizer's.
        groups: the optimizer's.
    """

    def __init__(
        self,
        graph: PathGraph,
        tensors: ModelTensors,
        owned: Mapping[str, Tensor],
        state: MutableMapping[Tensor, Any],
        groups: Sequence[dict[str, Any]],
    ) -> None:
        self.graph, self.owned, self.state, self.groups = graph, owned, state, groups
        self._tensors = tensors
        self._tensors.remember_structure()
        self.units = unit_classes_of(graph)
        self._find_free_units()
        self.sharded = any(map(is_sharded, self.parameters.values()))
        self._versions: list[Version] | None = None
        self._before: dict[str, Tensor] = {}
        """The weights as they were when the optimizer was made, until its first step: a checkpoint may tell
        that they were balanced as they were."""
        self._references: dict[str, dict[str, Tensor]] = {}
        self._lacks_references = False
        """Whether a state was loaded that has no references: it is taken to be of the weights as they are."""
        self._gather: KernelGather | None = None

    def _find_free_units(self) -> None:
        """Which units are rescaled, and the parameters that lead into or out of these."""
        self._trained = self._find_trained()
        self.held = find_held(self.units, set(self.units.parameters) - self._trained)
        self.parameters = {
            name: self.owned[name] for name, edge in self.units.parameters.items() if self._is_free(edge)
        }
        self._round: Round | KernelUpkeep | None = None

    def find_holding_vectors(self) -> list[str]:
        """Biases and gains that are not trained here, and alone keep all units of a trained matrix."""
        shapes = self.graph.parameters
        left_out = self.units.parameters.keys() - self._trained
        vectors = [name for name in left_out if len(shapes[name].shape) == 1]
        if not vectors:
            return []
        held = find_held(self.units, left_out - set(vectors))
        holding: set[str] = set()
        for name in self._trained & self.units.parameters.keys():
            units = self._units_of(name)
            free = units[~held[units]]
            if len(shapes[name].shape) > 1 and len(free) and bool(self.held[free].all()):
                holding |= {v for v in vectors if bool(torch.isin(self._units_of(v), free).any())}
        return sorted(holding)

    def _units_of(self, name: str) -> Tensor:
        edge = self.units.parameters[name]
        return torch.cat([edge.head.flatten(), edge.tail.flatten()]).unique()

    def _find_trained(self) -> set[str]:
        return {name for name, p in self.owned.items() if p.requires_grad}

    def _is_free(self, edge: EdgeClasses) -> bool:
        return not bool(self.held[edge.head].all()) or not bool(self.held[edge.tail].all())

    @property
    def steps(self) -> int:
        return self.groups[0].get(STEPS, 0)

    def connect(self, state: MutableMapping[Tensor, Any], groups: Sequence[dict[str, Any]]) -> None:
        """The optimizer's state and groups are other objects now."""
        self.state, self.groups = state, groups

    def start(self) -> None:
        """Balances the model and whatever gradients and state there are. If state was loaded before, the
        first step looks whether it is of these weights."""
        for group in self.groups:
            group[STEPS] = self.steps
        if self._has_state():
            self._take_up_state()
            return
        self._before = (
            {} if self.state else {n: local_part(p).detach().clone() for n, p in self.parameters.items()}
        )
        self._balance()

    def resume(self) -> None:
        """State was loaded. If it belongs to the weights from before this optimizer balanced them, they had
        been balanced already: they are put back."""
        before, self._before = self._before, {}
        is_as_balanced = self._find_versions() == self._versions
        self._take_up_state()
        if before and (is_as_balanced if self._lacks_references else self._are_remembered(before)):
            with torch.no_grad():
                for name, value in before.items():
                    local_part(self.parameters[name]).detach().copy_(value)

    def _take_up_state(self) -> None:
        self._round, self._versions = None, None
        self._references = {
            name: {key: self.state[p][key] for key in REFERENCE}
            for name, p in self.parameters.items() if REFERENCE[0] in self.state.get(p, ())
        }  # fmt: skip
        self._lacks_references = self._has_state() and not self._has_references()

    def forget_versions(self) -> None:
        self._versions = None

    def before_step(self) -> None:
        """Looks whether weights were written since the last step: what was rescaled is undone, anything else
        is balanced as it is."""
        self._check_structure()
        if self._find_trained() != self._trained:
            self._find_free_units()
        if not self.parameters or is_capturing():
            return
        self._round = self._round or self._make_round()
        self._before = {}
        now = self._find_versions()
        if now == self._versions:
            return
        if self._lacks_references:
            self._lacks_references = False
            self._choose_references()
            self._remember()
        elif self.sharded or not self._undo_rescaling():
            self._balance(state=not self.sharded)

    @contextlib.contextmanager
    def whole_gains(self) -> Iterator[None]:
        """In it gains that are stored without their 1 have it."""
        owned, shifts = self.owned, self.units.shifts
        gains = [(local_part(owned[n]).detach(), shifts[n]) for n in shifts if n in owned]
        for gain, shift in gains:
            gain.add_(shift)
        try:
            yield
        finally:
            for gain, shift in gains:
                gain.sub_(shift)

    def do_round(self) -> None:
        """Counts a step that was taken, and does a round if it is time."""
        steps = self.steps + 1
        for group in self.groups if self.parameters else ():
            group[STEPS] = steps
        if self.parameters and self._round is not None:
            self._round.run(self.state, steps)

    def after_step(self, is_still: bool) -> None:
        """Remembers where weights are."""
        if not self.parameters:
            return
        self._remember()
        if not is_still:
            for name, own in self._references.items():
                self.state[self.parameters[name]].update(own)

    def _make_round(self) -> Round | KernelUpkeep:
        edges = {name: self.units.parameters[name] for name in self.parameters}
        if self._on_gpu():
            from pathsgd.muon.gpu.upkeep import KernelUpkeep

            kernels = KernelUpkeep(self.parameters, edges, self.units.relations, self.held)
            if kernels.is_supported:
                return kernels
        return Round(self.parameters, edges, self.units.relations, self.held)

    def _on_gpu(self) -> bool:
        return not self.sharded and has_triton() and all(p.is_cuda for p in self.parameters.values())

    def _check_structure(self) -> None:
        """A unit's weights may be others by now, as where they were tied: rescaling it would be wrong."""
        if not self.sharded and not self._tensors.is_same_structure():
            raise PathError(
                "the model has other parameters or modules than when the optimizer was made (weights tied, "
                "pruned, merged or replaced since); make the optimizer again"
            )

    # Balance

    @torch.no_grad()
    def _balance(self, state: bool = True) -> None:
        if not self.parameters:
            return
        check_finite(self.parameters, self.parameters)
        with self.whole_gains():
            factors = find_balancing_factors(self.parameters, self.units, held=self.held)
        self._scale(factors, state)
        self._choose_references()
        self._remember()

    def _scale(self, factors: ClassFactors, state: bool) -> None:
        """Multiplies weights by factors, and gradients by their inverse; and the state, if it is told to."""
        with self.whole_gains():
            for name, p in self.parameters.items():
                factors.scale_(p, self.units.parameters[name])
        for name, p in self.parameters.items():
            edge = self.units.parameters[name]
            if p.grad is not None:
                factors.power(-1).scale_(p.grad, edge)
            for key, power in POWERS.items() if state else ():
                if p in self.state and key in self.state[p]:
                    factors.power(power).scale_(self.state[p][key], edge)

    # Rescalings by others

    def _find_versions(self) -> list[Version]:
        return find_versions(self.parameters)

    def _choose_references(self) -> None:
        """Remembers the largest entry of every row and every column, in the sense of units."""
        self._references = {}
        if self.sharded:
            return
        for name, p in self.parameters.items():
            size = p.detach().abs()
            numbers = torch.arange(p.numel(), device=p.device).reshape(p.shape)
            self._refer(name, torch.cat([_find_largest(size, numbers, ids) for ids in self._ends(name)]))
        joined = self._join_classes()
        if bool((joined != FIXED).any()):
            for name, p in self.parameters.items():
                head, tail = (joined[ids] for ids in self._ends(name))
                apart = (head != tail).expand(p.shape).to(p.device) & (p.detach() != 0)
                others = apart.flatten().nonzero().flatten()
                self._refer(name, torch.cat([self._references[name][REFERENCE[0]], others]))

    def _refer(self, name: str, index: Tensor) -> None:
        index = index.unique()
        values = self.parameters[name].detach().flatten()[index]
        self._references[name] = dict(zip(REFERENCE, (index, values), strict=True))

    def _join_classes(self) -> Tensor:
        """The smallest class that each class is connected to by remembered entries: FIXED for all, but for
        dead units, whose largest entries may lead to each other alone."""
        edges = join_changes([self._read_reference(name, p) for name, p in self.parameters.items()])
        heads, tails = (ids[edges.before != 0] for ids in (edges.heads, edges.tails))
        first = torch.where(self.held, FIXED, torch.arange(len(self.held)))
        while True:
            lower = torch.minimum(first[heads], first[tails])
            joined = first.scatter_reduce(0, heads, lower, "amin").scatter_reduce(0, tails, lower, "amin")
            if torch.equal(joined, first):
                return first
            first = joined

    def _ends(self, name: str) -> tuple[Tensor, Tensor]:
        edge = self.units.parameters[name]
        return edge.head, edge.tail

    def _remember(self) -> None:
        parameters = list(self.parameters.values())
        states = [] if self.sharded else [self._references[name] for name in self.parameters]
        if self._on_gpu() and all(p.dtype == torch.float32 for p in parameters):
            from pathsgd.muon.gpu.upkeep import KernelGather

            if self._gather is None or not self._gather.fits(parameters, states):
                self._gather = KernelGather(parameters, states)
            self._gather.run()
        elif not self.sharded:
            for p, state in zip(parameters, states, strict=True):
                torch.index_select(p.detach().reshape(-1), 0, state[REFERENCE[0]], out=state[REFERENCE[1]])
        if not is_capturing():
            self._versions = self._find_versions()

    def _are_remembered(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether remembered entries are those of these weights."""
        return self._has_references() and all(
            torch.equal(weights[name].reshape(-1)[own[REFERENCE[0]]], own[REFERENCE[1]])
            for name, own in self._references.items()
        )

    def _has_references(self) -> bool:
        return self._references.keys() == self.parameters.keys()

    def _has_state(self) -> bool:
        return bool(self.parameters) and all(self.state.get(p) for p in self.parameters.values())

    def _undo_rescaling(self) -> bool:
        """Whether all that was done to the weights is a rescaling of units; if so, it is undone in weights
        and gradients."""
        if not self._has_references():
            return False
        for name, own in self._references.items():  # the model may be of another dtype or device by now
            index, value = REFERENCE
            p = self.parameters[name]
            own[index], own[value] = own[index].to(p.device), own[value].to(p)
        if self._are_remembered({name: p.detach() for name, p in self.parameters.items()}):
            return True
        edges = [self._read_reference(name, p) for name, p in self.parameters.items()]
        factors = read_factors(join_changes(edges), self.units.relations, self.held)
        wide = {p.dtype for p in self.parameters.values() if p.element_size() >= 4}
        rounding = max((torch.finfo(dtype).eps for dtype in wide), default=0.0)
        if factors is None or not agree(factors, join_changes(edges), 64 * rounding):
            return False
        exact = find_exact(self.parameters, self.units.parameters, self.units.relations)
        if bool((torch.frexp(factors.mantissa).mantissa != 0.5)[exact].any()):
            return False
        self._scale(factors.power(-1), state=False)
        return True

    def _read_reference(self, name: str, p: Tensor) -> Changes:
        """The changes of the entries of a parameter that are remembered."""
        index, value = (self._references[name][key] for key in REFERENCE)
        head, tail = (ids.expand(p.shape).reshape(-1)[index.cpu()] for ids in self._ends(name))
        now, shift = p.detach().reshape(-1)[index], self.units.shifts.get(name, 0)
        before, after = (x.cpu().double() + shift for x in (value, now))
        return Changes(head, tail, before, after, torch.full_like(before, abs(shift)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_versions": None, "_round": None, "_gather": None}


def _find_largest(size: Tensor, numbers: Tensor, ids: Tensor) -> Tensor:
    """The number of the largest entry along the axes on which ids do not change, for each of the others."""
    dims = [d for d in range(size.dim()) if ids.shape[d] == 1]
    kept = [d for d in range(size.dim()) if ids.shape[d] > 1]
    order = (*kept, *dims)
    rows = 1
    for d in kept:
        rows *= size.shape[d]
    by_row = size.permute(order).reshape(rows, -1)
    return numbers.permute(order).reshape(rows, -1).gather(1, by_row.argmax(1, keepdim=True))[:, 0]
