"""Which rescalings leave a network as it is, by equations between the logarithms of scales.

A block that is written for torch says here once more, channel by channel, how the scale of its output
follows from that of its input. Scales are tensors of numbers of expressions, of batch one, so that whatever
only moves channels is done to them by the same torch call. Shares nothing with the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

FIXED = 0
"""The expression that is always zero: a scale of one."""


@dataclass(frozen=True)
class Rescaling:
    """One number c > 0: entry ``index`` (flat) of parameter ``name`` times ``c**power``."""

    kind: str
    """What the units are and what they go through, joined by +."""
    entries: list[tuple[str, int, float]]

    @torch.no_grad()
    def apply(self, model: nn.Module, c: float) -> None:
        parameters = dict(model.named_parameters())
        for name, index, power in self.entries:
            parameters[name].data.view(-1)[index] *= c**power


class Ledger:
    def __init__(self):
        self.expressions = [()]
        self.numbers = {(): FIXED}
        self.labels: list[set[str]] = []
        self.equations: set[int] = set()
        self.parameters: dict[nn.Parameter, torch.Tensor] = {}

    # Scales

    def fresh(self, kind, *shape):
        """Scales of their own."""
        count = int(torch.Size(shape).numel())
        first = len(self.labels)
        self.labels += [{kind} for _ in range(count)]
        ids = [self._number({variable: Fraction(1)}) for variable in range(first, first + count)]
        return torch.tensor(ids).reshape(shape)

    def multiply(self, a, b, power=1):
        """The scales of a * b**power."""
        a, b = torch.broadcast_tensors(a, b)
        pairs, place = torch.unique(torch.stack([a.flatten(), b.flatten()]), dim=1, return_inverse=True)
        joined = []
        for left, right in pairs.T.tolist():
            terms = dict(self.expressions[left])
            for variable, coefficient in self.expressions[right]:
                terms[variable] = terms.get(variable, 0) + power * coefficient
            joined.append(self._number(terms))
        return torch.tensor(joined)[place].reshape(a.shape)

    def mark(self, ids, label):
        """Notes what the units go through."""
        for number in ids.unique().tolist():
            for variable, _ in self.expressions[number]:
                self.labels[variable].add(label)
        return ids

    def _number(self, terms):
        expression = tuple(sorted((v, c) for v, c in terms.items() if c))
        if expression not in self.numbers:
            self.numbers[expression] = len(self.expressions)
            self.expressions.append(expression)
        return self.numbers[expression]

    # Equations

    def tie(self, a, b):
        """a = b. Returns one of them."""
        self.equations.update(self.multiply(a, b, -1).unique().tolist())
        return a if a.numel() >= b.numel() else b

    def fix(self, *scales):
        """Scales of one, as before an operator that is not homogeneous. Returns that of its result."""
        for ids in scales:
            self.equations.update(ids.unique().tolist())
        return torch.full_like(scales[0], FIXED)

    def tie_along(self, ids, *dims):
        """One scale along these axes, which keep size one."""
        for dim in dims:
            first = ids.narrow(dim, 0, 1)
            self.tie(ids, first)
            ids = first
        return ids

    def parameter(self, parameter, head, tail=None):
        """Entries lead from ``tail`` to ``head``. Used twice, they have one scale."""
        scale = head if tail is None else self.multiply(head, tail, -1)
        scale = scale.expand(parameter.shape)
        self.tie(self.parameters.setdefault(parameter, scale), scale)

    # Modules

    def linear(self, module, ids, kind):
        tail = self.tie_along(ids, *range(ids.dim() - 1)).reshape(-1)
        head = self.fresh(kind, module.out_features)
        self.parameter(module.weight, head[:, None], tail[None])
        if module.bias is not None:
            self.parameter(module.bias, head)
        return head.expand(*ids.shape[:-1], -1)

    def conv(self, module, ids, kind):
        """Of any number of axes, in groups, transposed."""
        places = range(2, ids.dim())
        tail = self.tie_along(ids, *places).reshape(-1)
        head = self.fresh(kind, module.out_channels)
        g, taps = module.groups, (1,) * len(places)
        if module.transposed:
            scale = self.multiply(head.view(g, 1, -1), tail.view(g, -1, 1), -1)
        else:
            scale = self.multiply(head.view(g, -1, 1), tail.view(g, 1, -1), -1)
        self.parameter(module.weight, scale.reshape(*module.weight.shape[:2], *taps))
        if module.bias is not None:
            self.parameter(module.bias, head)
        with torch.no_grad():
            shape = module(torch.zeros(ids.shape, dtype=torch.float64)).shape
        return head.view(1, -1, *taps).expand(shape)

    def gain(self, module, ids, kind):
        """A norm: its input is fixed, its affine part is not."""
        self.fix(ids)
        channel = 1 if ids.dim() == 4 else ids.dim() - 1
        head = self.fresh(kind, ids.shape[channel])
        for parameter in module.parameters():
            self.parameter(parameter, head)
        return head.view(-1, *(1,) * (ids.dim() - 1 - channel)).expand(ids.shape)

    # Solution

    def solve(self, model) -> list[Rescaling]:
        """A basis of the scales that satisfy all equations, one rescaling for each."""
        rows: dict[int, dict[int, Fraction]] = {}
        for number in self.equations:
            row = _reduce(dict(self.expressions[number]), rows)
            if row:  # the youngest is eliminated, so that a free one is where a scale comes from
                pivot = max(row)
                rows[pivot] = {v: -c / row[pivot] for v, c in row.items() if v != pivot}
        solved = {v: _reduce({v: Fraction(1)}, rows) for v in range(len(self.labels))}
        names = {parameter: name for name, parameter in model.named_parameters()}
        entries: dict[int, list] = {}
        for parameter, scale in self.parameters.items():
            powers = {}
            for number in scale.unique().tolist():
                total: dict[int, Fraction] = {}
                for variable, coefficient in self.expressions[number]:
                    for free, share in solved[variable].items():
                        total[free] = total.get(free, 0) + coefficient * share
                powers[number] = total
            for index, number in enumerate(scale.flatten().tolist()):
                for free, power in powers[number].items():
                    if power:
                        entries.setdefault(free, []).append((names[parameter], index, float(power)))
        labels: dict[int, set[str]] = {}
        for variable, frees in solved.items():
            for free in frees:
                labels.setdefault(free, set()).update(self.labels[variable])
        return [Rescaling("+".join(sorted(labels[free])), entries[free]) for free in sorted(entries)]


def _reduce(row, rows):
    """A row without pivots."""
    while found := [v for v in row if v in rows]:
        pivot = max(found)
        coefficient = row.pop(pivot)
        for variable, share in rows[pivot].items():
            row[variable] = row.get(variable, 0) + coefficient * share
            if not row[variable]:
                del row[variable]
    return row
