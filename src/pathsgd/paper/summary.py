"""What a study comes to: tables and claims, as a report prints them."""

from __future__ import annotations

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
