"""Claims about methods: on how many networks they hold, and where not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .methods import LABELS, PLAIN
from .networks import NETWORKS
from .records import Cell

Row = dict[str, Cell]  # by the label of the method
Rows = dict[str, Row]  # by network
Mean = Callable[[Row], float | None]

OURS = [LABELS[name] for name in ("balanced-muon", "path-muon")]
"""Methods that claims are about, those of recorded runs included."""


def state_verdicts(balanced: Rows, unbalanced: Rows) -> str:
    """A line for each claim that there are numbers for."""
    lines = []
    for method in OURS:
        ours, claim = mean_of(method), f"{method} ahead of the best-tuned SGD, AdamW and Muon"
        lines.append(compare(claim, balanced, ours, best_tuned))
        lines.append(compare(f"From unbalanced weights, {claim}", unbalanced, ours, best_tuned))
        lines.append(compare_starts(method, balanced, unbalanced))
    return "\n".join(line for line in lines if line)


def mean_of(method: str) -> Mean:
    return lambda row: row[method].mean if method in row else None


def best_tuned(row: Row) -> float | None:
    """The best of the plain optimizers, if all of them were run."""
    tuned = [LABELS[name] for name in PLAIN]
    return min(row[m].mean for m in tuned) if all(m in row for m in tuned) else None


def compare(claim: str, rows: Rows, ours: Mean, theirs: Mean) -> str:
    """Counts the networks on which ``ours <= theirs``, and names the others."""
    misses, count = [], 0
    for network, row in rows.items():
        a, b = ours(row), theirs(row)
        if a is None or b is None:
            continue
        count += 1
        if math.isinf(a) or a > b:
            misses.append(f"{NETWORKS[network].label} {number(a)} against {number(b)}")
    return _state(claim, count, misses)


def compare_starts(method: str, balanced: Rows, unbalanced: Rows) -> str:
    """Counts the networks on which both starts end within the spread of seeds, and names the others."""
    misses, count = [], 0
    for network, row in unbalanced.items():
        a, b = balanced.get(network, {}).get(method), row.get(method)
        if a is None or b is None or len(a.values) < 2 or len(b.values) < 2:
            continue
        count += 1
        if not abs(a.mean - b.mean) <= (a.spread or 0) + (b.spread or 0):
            misses.append(f"{NETWORKS[network].label} {number(a.mean)} and {number(b.mean)}")
    claim = f"{method} from both starts no further apart than the sum of both standard deviations"
    return _state(claim, count, misses)


def _state(claim: str, count: int, misses: Iterable[str]) -> str:
    misses = list(misses)
    where = f" Not: {'; '.join(misses)}." if misses else ""
    return f"- {claim}: {count - len(misses)} of {count} networks.{where}" if count else ""


def number(value: float, like: float | None = None) -> str:
    """Text with as many digits as mean something: errors in percent one or two, losses three."""
    if math.isinf(value):
        return "diverges"
    size = abs(value if like is None else like)
    return f"{value:.1f}" if size >= 20 else f"{value:.2f}" if size >= 5 else f"{value:.3f}"
