"""Rows of results: written to ``results/uses/NAME.json``, read again, printed as a table of its README."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .networks import NETWORKS

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


def measure_by_network(
    name: str,
    about: str | None,
    measure: Callable[[str, Any], Iterable[Row]],
    tabulate: Callable[[list[Row]], None],
    draw: Callable[[list[Row]], None],
) -> None:
    """Measures the networks named on the command line anew; prints and draws the rows of all."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("networks", nargs="*", help=f"to measure anew, of {list(NETWORKS)}")
    parser.add_argument("--data", type=Path, default=Path("data"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows(name)
    for network in options.networks:
        others = [row for row in rows if row["network"] != network]
        rows = [*others, *measure(network, NETWORKS[network].task(options.data))]
        write_rows(name, rows)
    tabulate(rows)
    draw(rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """In Markdown."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def average(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [float(row[key]) for row in rows]
    return sum(values) / len(values)
