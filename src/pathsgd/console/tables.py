"""Tables as lines of text."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]], sides: str, rule: bool = False) -> list[str]:
    """Rows as lines, each column aligned to its side; with a rule below the first row.

    >>> print("\\n".join(align([("net", "us"), ("small", "7")], "<>", rule=True)))
    net    us
    ---------
    small   7
    """
    widths = [max(len(row[k]) for row in rows) for k in range(len(sides))]
    lines = [
        "  ".join(f"{cell:{side}{n}}" for cell, side, n in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]] if rule else lines
