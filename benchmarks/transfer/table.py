"""The tables: what every method reaches, and which rate was best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from .methods import LABELS
from .networks import NETWORKS
from .records import Cell, Cells, best_rate, cells_of, default_cell
from .train import Record
from .verdicts import Rows, number, state_verdicts

TITLES = {
    "balanced": "the weights as initialised",
    "unbalanced": "unbalanced weights",
    "balanced+balance": "the weights as initialised, `balance` once",
    "unbalanced+balance": "unbalanced weights, `balance` once",
    "unbalanced+balance(2,inf)": "unbalanced weights, `balance(p=2, q=inf)` once",
}
HEAD = """{count} runs on {device}, torch {torch}; {failed} failed. SHA-256 of the data: {data}.

Validation error in percent (CIFAR-10) or loss in nats (text, digits): mean ± standard deviation over seeds.
A rate in brackets is the best of a grid of factor √10, chosen for each network with one seed, from the
weights as initialised if no grid was run from that start; where there is none, the method has its one
default rate. Bold: the best of a row."""


def write_table(records: Sequence[Record], into: Path) -> Path:
    """Writes ``into/table.md``."""
    into.mkdir(parents=True, exist_ok=True)
    path = into / "table.md"
    path.write_text(render(records))
    return path


def render(records: Sequence[Record]) -> str:
    """All tables in Markdown, each where there is something to put into it."""
    cells = cells_of(records)
    methods = _order({key[1] for key in cells})
    parts = ["# One learning rate for every network", _head(records)]
    for epochs in sorted({key[3] for key in cells}):
        starts = {start: select(cells, methods, start, epochs) for start in TITLES}
        sections = {TITLES[start]: _results(rows, methods) for start, rows in starts.items() if rows}
        sections["who is ahead"] = state_verdicts(starts["balanced"], starts["unbalanced"])
        sections["the best rate, of one seed"] = _rates(cells, methods, epochs)
        parts += [f"## {epochs} epochs: {title}\n\n{text}" for title, text in sections.items() if text]
    return "\n\n".join(parts) + "\n"


def _order(labels: set[str]) -> list[str]:
    known = [name for name in LABELS.values() if name in labels]
    return known + sorted(labels - set(known))


def _head(records: Sequence[Record]) -> str:
    def names(field: str) -> str:
        return ", ".join(sorted({str(record[field]) for record in records if record.get(field)}))

    failed = sum("failure" in record for record in records)
    return HEAD.format(
        count=len(records), failed=failed, **{field: names(field) for field in ("device", "torch", "data")}
    )


def select(cells: Cells, methods: Iterable[str], start: str, epochs: int) -> Rows:
    """By network and method: the default rate if the method was run at it, else the best rate."""
    rows: Rows = {}
    for network in NETWORKS:
        for method in methods:
            tried = cells.get((network, method, start, epochs))
            if tried:
                default = default_cell(cells, network, method, start, epochs)
                best = best_rate(cells, network, method, start, epochs)
                rows.setdefault(network, {})[method] = default or best or tried[0]
    return rows


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _results(rows: Rows, methods: Sequence[str]) -> str:
    present = [m for m in methods if any(m in row for row in rows.values())]
    lines = []
    for network, row in rows.items():
        best = min(cell.mean for cell in row.values())
        lines.append([NETWORKS[network].label, *(result(row.get(m), best) for m in present)])
    return markdown(["network", *present], lines)


def result(cell: Cell | None, best: float) -> str:
    """Mean and spread, bold if the mean is the best."""
    if cell is None:
        return ""
    if math.isinf(cell.mean):
        lost = sum(value is None for value in cell.values)
        return "diverges" if lost == len(cell.values) else f"diverges ({lost} of {len(cell.values)})"
    text = number(cell.mean)
    if cell.spread is not None:
        text += f" ± {number(cell.spread, like=cell.mean)}"
    if cell.mean == best:
        text = f"**{text}**"
    return text if cell.lr is None else f"{text} ({cell.rate:g})"


def _rates(cells: Cells, methods: Sequence[str], epochs: int) -> str:
    """The best rate of each network, and how far the best rates of one method are apart."""
    columns: dict[str, dict[str, str]] = {}
    for method in methods:
        best: dict[str, float] = {}
        column: dict[str, str] = {}
        for network in NETWORKS:
            rates = [cell.rate for cell in cells.get((network, method, "balanced", epochs), [])]
            cell = best_rate(cells, network, method, "balanced", epochs)
            if cell is not None and len(set(rates)) > 2:
                best[network] = cell.rate
                edge = ", edge of the grid" if cell.rate in (min(rates), max(rates)) else ""
                column[network] = f"{cell.rate:g}{edge}"
        if best:
            column["apart"] = f"{max(best.values()) / min(best.values()):.3g}"
            columns[method] = column
    names = {name: network.label for name, network in NETWORKS.items()} | {"apart": "largest / smallest"}
    rows = [
        [label, *(column.get(name, "") for column in columns.values())]
        for name, label in names.items()
        if any(name in column for column in columns.values())
    ]
    return markdown(["network", *columns], rows) if columns else ""
