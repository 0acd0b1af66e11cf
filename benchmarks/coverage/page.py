"""results/coverage/README.md, from what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from .full_size import FullSize
from .measure import STEPS, Row
from .models import GROUPS

EXACT = 1e-9
"""Below it numbers of fp64 count as rounding."""
MOST_AFFECTED = 30
NAMED = 3
"""Causes that are named for a network."""

HEAD = f"""# Coverage

Which weights of a network are protected against rescaling: {{count}} networks in small, most of them
models of the transformers library by their configurations (two layers of width 64), then layers of torch,
and odd ways to write a forward pass. `python -m benchmarks.coverage --write` wrote this page, with torch
{{torch}}{{transformers}}.

**Found.** {{found}}

**Kept.** {{kept}}

## The columns

- **one side**: the share of weights with a symmetry: some rescaling of units multiplies or divides them
  and leaves the function as it is. `balance` and `BalancedMuon` protect them: however units are scaled at
  the start, training is the same.
- **both sides**: the share with one symmetry for the unit that they lead into and one for the unit that
  they read. The first and the last layer of a network have one side only.
- **units**: how many factors can be chosen independently.
- **s**: seconds to trace the model and to find its units, once, on one core.
- **rescaled**: by how much the output changes if units are rescaled at random, relative to its norm.
- **balanced**: the same if the model is balanced.
- **one network**: the largest difference between a parameter after `balance`, and after `balance` of a
  rescaled copy, relative to its norm.
- **{STEPS} steps**: `BalancedMuon` takes {STEPS} steps from the model and from a rescaled copy. The
  difference of the outputs afterwards, relative to how far training moved them.

The last four should be zero but for rounding. All are of fp64, also where a model casts to fp32, and of
eval mode, with random numbers in every bias and gain.

**Not protected** is a weight without a symmetry: no rescaling of it has been found that other weights
could undo. `BalancedMuon` trains it like all others. [Reasons](#what-has-no-symmetry) are below.
"""

REASONS = f"""
## What has no symmetry

The networks with the most weights without any, and the operators next to these weights: *behind*, where what
they compute goes; *before*, where what they read comes from. A weight counts in both columns, by the nearest
operator. The shares are of all weights; the {NAMED} largest are named.

| network | without | behind | before |
|---|---:|---|---|
"""


FULL_SIZE = """
## At full size

Decoders as published, on the meta device. *Matrices*: without embeddings and head. What leads into the
residual stream has one side: nothing can be rescaled between it and the next norm. Seconds are of one core,
trace and search.

| network | 10^9 weights | one side | matrices: one side | both sides | without any | s |
|---|---:|---:|---:|---:|---:|---:|
"""


def write_page(rows: Sequence[Row], full_size: Sequence[FullSize] = ()) -> str:
    by_name = {row.name: row for row in rows}
    parts = [_head(rows)]
    for group, builders in GROUPS.items():
        chosen = [by_name[name] for name in builders if name in by_name]
        if chosen:
            parts.append(f"\n## {group}\n\n{_table(chosen)}")
    parts.append(_full_size(full_size))
    parts.append(_reasons(rows))
    return "".join(parts)


def _head(rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.one_side is not None]
    most = sum(row.one_side >= 0.5 for row in measured)
    none = sum(not row.units for row in measured)
    failed = len(rows) - len(measured)
    found = f"In {most} of {len(rows)} networks most weights have a symmetry, in {none} none has."
    if failed:
        found += f" {failed} cannot be traced: the table says why."
    checked = [row for row in measured if row.units and row.steps is not None]
    inexact = [row.name for row in checked if max(_promises(row)) > EXACT]
    kept = (
        f"Of {len(checked)} networks with symmetries {len(checked) - len(inexact)} pass all four checks to "
    )
    kept += f"{EXACT:.0e}; not {', '.join(inexact)}." if inexact else f"{EXACT:.0e}."
    return HEAD.format(
        count=len(rows), torch=torch.__version__.split("+")[0], transformers=_transformers_version(),
        found=found, kept=kept,
    )  # fmt: skip


def _promises(row: Row) -> list[float]:
    return [x for x in (row.unbalanced, row.balanced, row.agree, row.steps) if x is not None]


def _transformers_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f", transformers {version('transformers')}"
    except PackageNotFoundError:
        return ""


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| network | weights | one side | both sides | units | s | rescaled | balanced | one network "
        f"| {STEPS} steps |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            row.name, f"{row.weights:,}", _percent(row.one_side, "not traced"), _percent(row.both_sides),
            _or_empty(row.units), "" if row.seconds is None else f"{row.seconds:.1f}",
            *map(_tiny, (row.unbalanced, row.balanced, row.agree, row.steps)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    errors = [row for row in rows if row.error]
    lines += ["", *(f"- {row.name}: {_escape(row.error)}" for row in errors)] if errors else []
    return "\n".join(lines) + "\n"


def _full_size(found: Sequence[FullSize]) -> str:
    rows = []
    for one in found:
        total, inner = one.total, one.matrices
        shares = (
            total.one_side / total.weights,
            inner.one_side / inner.weights,
            inner.both_sides / inner.weights,
        )
        cells = [one.name, f"{total.weights / 1e9:.2f}", *map(_percent, shares), str(inner.without)]
        rows.append(f"| {' | '.join(cells)} | {one.seconds:.1f} |")
    return FULL_SIZE + "\n".join(rows) + "\n"


def _reasons(rows: Sequence[Row]) -> str:
    affected = [row for row in rows if row.one_side is not None and row.one_side < 1]
    affected.sort(key=lambda row: row.one_side)
    lines = [
        f"| {row.name} | {_percent(1 - row.one_side)} | {_causes(row.behind, row.weights)} "
        f"| {_causes(row.before, row.weights)} |"
        for row in affected[:MOST_AFFECTED]
    ]
    return REASONS + "\n".join(lines) + "\n"


def _causes(counts: Mapping[str, int], weights: int) -> str:
    short: Counter[str] = Counter()
    for cause, n in counts.items():
        short[cause.removeprefix("outside: ").removesuffix(" is not positively homogeneous")] += n
    named = [(cause, n / weights) for cause, n in short.most_common(NAMED) if n >= 0.005 * weights]
    return ", ".join(f"{_escape(cause)} {share:.0%}" for cause, share in named)


def _escape(text: str) -> str:
    """Angle brackets, underscores and bars mean something in Markdown."""
    for mark in "\\|<>_*`[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def _percent(share: float | None, otherwise: str = "") -> str:
    return otherwise if share is None else f"{share:.0%}"


def _or_empty(value: int | None) -> str:
    return "" if value is None else str(value)


def _tiny(value: float | None) -> str:
    """A number as a power of ten; 0 if it is zero."""
    return "" if value is None else f"{value:.0e}" if value else "0"


def print_row(row: Row) -> str:
    """One line for a terminal."""
    numbers = " ".join(f"{_tiny(x):>6}" for x in (row.unbalanced, row.balanced, row.agree, row.steps))
    seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
    return (
        f"{row.name:38} {row.weights:7} {_percent(row.one_side):>5} {_percent(row.both_sides):>5} "
        f"{_or_empty(row.units):>5} {seconds:>5} {numbers} {row.error[:100]}"
    ).rstrip()
