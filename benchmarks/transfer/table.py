"""The tables: what every method reaches, what is ahead, and which rate was best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .methods import LABELS, PLAIN
from .networks import NETWORKS
from .records import Cell, Cells, best_rate, cells_of, default_cell
from .train import Record

TUNED = [LABELS[name] for name in PLAIN]
ADAMW, PATH_ADAM, PATH_MUON = LABELS["adamw"], LABELS["path-adam"], LABELS["path-muon"]
TITLES = {
    "balanced": "the weights as initialised",
    "unbalanced": "unbalanced weights",
    "balanced+balance": "the weights as initialised, `balance` once",
    "unbalanced+balance": "unbalanced weights, `balance` once",
}
Rows = dict[str, dict[str, Cell]]


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
    parts = ["# One learning rate for every network", _origin(records)]
    for epochs in sorted({key[3] for key in cells}):
        starts = {start: select(cells, methods, start, epochs) for start in TITLES}
        for start, rows in starts.items():
            if rows:
                parts += [f"## {epochs} epochs, {TITLES[start]}", _results(rows, methods)]
        parts += [f"## {epochs} epochs: who is ahead", _verdicts(starts)]
        parts += [f"## {epochs} epochs: the best rate of one seed", _rates(cells, methods, epochs)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _order(found: set[str]) -> list[str]:
    known = [name for name in LABELS.values() if name in found]
    return known + sorted(found - set(known))


def _origin(records: Sequence[Record]) -> str:
    def names(field: str) -> str:
        return ", ".join(sorted({str(record[field]) for record in records if record.get(field)}))

    failed = sum("failure" in record for record in records)
    return (
        f"{len(records)} runs on {names('device')}, torch {names('torch')}; SHA-256 of the data: {names('data')}. "
        f"{failed} runs failed. Validation error in percent (CIFAR-10) or loss in nats (text, digits): mean ± "
        "standard deviation over seeds, the rate in brackets. SGD, AdamW and Muon have the best rate of a grid of "
        "factor √10, chosen with one seed for each network ('edge': at an end of the grid); the others have their "
        "one default rate. Bold: the best of a row."
    )  # fmt: skip


def select(cells: Cells, methods: Iterable[str], start: str, epochs: int) -> Rows:
    """By network and method: the default rate where the method has one that was run, else the best rate."""
    rows: Rows = {}
    for network in NETWORKS:
        row = {}
        for method in methods:
            cell = default_cell(cells, network, method, start, epochs)
            if cell is None:
                tried = cells.get((network, method, start, epochs), [])
                cell = best_rate(cells, network, method, start, epochs) or next(iter(tried), None)
            if cell is not None:
                row[method] = cell
        if row:
            rows[network] = row
    return rows


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _results(rows: Rows, methods: Sequence[str]) -> str:
    present = [m for m in methods if any(m in row for row in rows.values())]
    lines = []
    for network, row in rows.items():
        best = min(cell.mean for cell in row.values())
        lines.append([NETWORKS[network].label, *(_cell(row.get(m), best) for m in present)])
    return _table(["network", *present], lines)


def _cell(cell: Cell | None, best: float) -> str:
    if cell is None:
        return ""
    if math.isinf(cell.mean):
        lost = sum(value is None for value in cell.values)
        return "diverges" if lost == len(cell.values) else f"diverges ({lost} of {len(cell.values)})"
    text = number(cell.mean)
    if cell.spread is not None:
        text += f" ± {number(cell.spread, like=cell.mean)}"
    text = f"**{text}**" if cell.mean == best else text
    return text if cell.lr is None else f"{text} ({cell.rate:g})"


def number(value: float, like: float | None = None) -> str:
    """Errors in percent with one digit or two, losses with three."""
    size = abs(value if like is None else like)
    return f"{value:.1f}" if size >= 20 else f"{value:.2f}" if size >= 5 else f"{value:.3f}"


def _verdicts(starts: dict[str, Rows]) -> str:
    balanced, unbalanced = starts["balanced"], starts["unbalanced"]

    def tuned(row: dict[str, Cell]) -> float | None:
        return min((row[m].mean for m in TUNED if m in row), default=None)

    def mean(method: str) -> Callable[[dict[str, Cell]], float | None]:
        return lambda row: row[method].mean if method in row else None

    on_weights = {PATH_ADAM: LABELS["relative-adam"], PATH_MUON: LABELS["relative-muon"]}
    return "\n".join(
        line
        for line in (
            _compare("PathMuon ahead of the best-tuned SGD, AdamW and Muon", balanced, mean(PATH_MUON), tuned, 1.0),
            _compare("PathAdam within 2% of the best-tuned AdamW", balanced, mean(PATH_ADAM), mean(ADAMW), 1.02),
            *(
                _compare(f"{on_paths} within 2% of the same on weights", balanced, mean(on_paths), mean(raw), 1.02)
                for on_paths, raw in on_weights.items()
            ),
            _compare("From unbalanced weights, PathMuon ahead of the tuned three", unbalanced, mean(PATH_MUON), tuned, 1.0),
            *(_same(method, balanced, unbalanced) for method in on_weights),
        )
        if line
    )  # fmt: skip


def _compare(
    claim: str,
    rows: Rows,
    ours: Callable[[dict[str, Cell]], float | None],
    theirs: Callable[[dict[str, Cell]], float | None],
    bound: float,
) -> str:
    """On how many networks ``ours <= bound * theirs``, and where not."""
    pairs = {network: (ours(row), theirs(row)) for network, row in rows.items()}
    both = {network: (a, b) for network, (a, b) in pairs.items() if a is not None and b is not None}
    misses = [
        f"{NETWORKS[network].label} {number(a)} against {number(b)}"
        for network, (a, b) in both.items()
        if math.isinf(a) or a > bound * b
    ]
    if not both:
        return ""
    where = f" Not: {'; '.join(misses)}." if misses else ""
    return f"- {claim}: {len(both) - len(misses)} of {len(both)} networks.{where}"


def _same(method: str, balanced: Rows, unbalanced: Rows) -> str:
    """Where the start makes a difference that seeds do not explain."""
    both = [
        (NETWORKS[network].label, balanced[network][method], row[method])
        for network, row in unbalanced.items()
        if method in row and method in balanced.get(network, {})
    ]
    both = [(name, a, b) for name, a, b in both if len(a.values) > 1 and len(b.values) > 1]
    misses = [
        f"{name} {number(a.mean)} and {number(b.mean)}"
        for name, a, b in both
        if not abs(a.mean - b.mean) <= (a.spread or 0) + (b.spread or 0)
    ]
    if not both:
        return ""
    where = f" Not: {'; '.join(misses)}." if misses else ""
    claim = f"{method} from both starts apart by no more than the two standard deviations together"
    return f"- {claim}: {len(both) - len(misses)} of {len(both)} networks.{where}"


def _rates(cells: Cells, methods: Sequence[str], epochs: int) -> str:
    """The best rate of each network, and how far the best rates of one method are apart."""
    found: dict[str, dict[str, tuple[Cell, bool]]] = {}
    for method in methods:
        for network in NETWORKS:
            tried = cells.get((network, method, "balanced", epochs), [])
            best = best_rate(cells, network, method, "balanced", epochs)
            if best is not None and len({c.rate for c in tried}) > 2:
                edge = best.rate in (tried[0].rate, tried[-1].rate)
                found.setdefault(method, {})[network] = best, edge
    if not found:
        return ""
    rows = [
        [NETWORKS[n].label, *(_rate(found[m].get(n)) for m in found)]
        for n in NETWORKS
        if any(n in by for by in found.values())
    ]
    rates = [[cell.rate for cell, _ in by.values()] for by in found.values()]
    rows.append(["largest / smallest", *(f"{max(r) / min(r):.3g}" for r in rates)])
    defaults = [_default_rate(cells, method) for method in found]
    rows.append(["default", *("" if d is None else f"{d:g}" for d in defaults)])
    return _table(["network", *found], rows)


def _rate(found: tuple[Cell, bool] | None) -> str:
    if found is None:
        return ""
    cell, edge = found
    return f"{cell.rate:g}" + (", edge" if edge else "")


def _default_rate(cells: Cells, method: str) -> float | None:
    """What was used where none was given."""
    used = [c.rate for (_, m, _, _), group in cells.items() if m == method for c in group if c.lr is None]
    return used[0] if used else None
