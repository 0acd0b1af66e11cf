"""The tables of a study, and how they are printed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pathsgd.console.tables import align
from pathsgd.paper.data.dataset import TABLE_1, dimensionality, short_name
from pathsgd.paper.evidence import last
from pathsgd.paper.experiment.results import Choice, Results
from pathsgd.paper.optimizers import find_method
from pathsgd.paper.summary import Claim, Table


def tables(results: Results) -> list[Table]:
    return [data_table(results), results_table(results)]


def data_table(results: Results) -> Table:
    """The paper's Table 1, from what was loaded."""
    rows = []
    for name, info in results.data.items():
        sizes = (info.classes, info.train, info.test)
        rows.append([short_name(name), dimensionality(info.shape), *map(str, sizes)])
    return Table("Data sets", list(TABLE_1), rows)


def results_table(results: Results) -> Table:
    """The step size chosen for every cell, and what it came to."""
    head = ["data set", "dropout", "start", "method", "step size", "validation error", "training loss",
            "training error", "test error"]  # fmt: skip
    rows = []
    for choice in results.choices:
        cell, best = choice.cell, choice.best
        runs = results.finals[cell]
        names = [short_name(cell.dataset), f"{cell.dropout:g}", cell.init, find_method(cell.method).label]
        if best is None:
            rows.append([*names, "none", _losers(choice), "", "", ""])
            continue
        rows.append(
            [*names, f"{best.step_size:g}", f"{best.best_error:.2%}", last(runs, "train_loss").plain(),
             last(runs, "train_error").percent(), last(runs, "test_error").percent()]
        )  # fmt: skip
    study = results.study
    note = (
        f"After {study.epochs} epochs on all the training data; training loss and error are means over the "
    )
    note += "last epoch's batches, as each was met."
    if study.repeats > 1:
        note += f" Means over {study.repeats} seeds, and from the least to the largest."
    return Table("Results", head, rows, note)


def choices_table(choices: Sequence[Choice]) -> Table:
    """Every step size that was tried."""
    sizes = sorted({tried.step_size for choice in choices for tried in choice.tried}, reverse=True)
    rows = []
    for choice in choices:
        cell = choice.cell
        names = [short_name(cell.dataset), f"{cell.dropout:g}", cell.init, find_method(cell.method).label]
        found = {tried.step_size: tried for tried in choice.tried}
        cells = []
        for size in sizes:
            tried = found.get(size)
            text = (
                "" if tried is None else f"{tried.best_error:.2%}" if tried.status == "done" else tried.status
            )
            cells.append(f"[{text}]" if size == choice.step_size else text)
        rows.append([*names, *cells])
    head = ["data set", "dropout", "start", "method", *(f"{size:g}" for size in sizes)]
    return Table("Validation error by step size, the chosen one in brackets", head, rows)


def _losers(choice: Choice) -> str:
    return ", ".join(sorted({tried.status for tried in choice.tried}))


def printed(table: Table) -> str:
    """For a terminal."""
    lines = align([table.head, *table.rows], "<" * len(table.head))
    lines.insert(1, "-" * max(map(len, lines)))
    note = textwrap.wrap(table.note, 100)
    return "\n".join([table.title, "", *lines, *note])


def printed_claims(claims: Sequence[Claim]) -> str:
    lines = ["The paper's claims", ""]
    for claim in claims:
        lines += textwrap.wrap(f"{claim.number}. {claim.verdict.upper()}: {claim.text}", 110,
                               subsequent_indent="   ")  # fmt: skip
        for text in claim.evidence:
            lines += textwrap.wrap(text, 110, initial_indent="     - ", subsequent_indent="       ")
    return "\n".join(lines)
