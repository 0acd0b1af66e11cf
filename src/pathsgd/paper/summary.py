"""What a study comes to: tables and claims, as a report prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["held", "not held", "not tested"]
AGAINST, NOT_COUNTED = "AGAINST: ", "NOT COUNTED: "


@dataclass(frozen=True)
class Table:
    """Text in rows and columns."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, what came of it, and the numbers that say so."""

    number: int
    text: str
    verdict: Verdict
    evidence: list[str]
    """Marked where it speaks against the claim, or does not count."""


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Rows as lines of text, each column to its side: < or >."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(sides))]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
