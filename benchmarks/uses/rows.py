"""Rows of results: written to ``results/uses/NAME.json``, read again, printed as a table of docs/uses.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "uses"
FIGURES = ROOT / "docs" / "figures"

Row = dict[str, Any]


def write_rows(name: str, rows: Sequence[Row]) -> None:
    """One row a line, so that a changed number is a changed line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    (RESULTS / f"{name}.json").write_text(f"[\n{lines}\n]\n")


def read_rows(name: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text())
    return rows


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """In Markdown."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def average(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [float(row[key]) for row in rows]
    return sum(values) / len(values)
