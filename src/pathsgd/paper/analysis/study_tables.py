"""The tables of a study, and tables and claims as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from pathsgd.console.tables import align
from pathsgd.paper.analysis.claims import Claim, judge_claims
from pathsgd.paper.analysis.statistics import summarize_last
from pathsgd.paper.config import Cell
from pathsgd.paper.data.dataset import TABLE_1, dimensionality, short_name
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.records.study_results import Choice, StudyResults, Trial

CELL_HEAD = ["data set", "dropout", "start", "method"]


@dataclass(frozen=True)
class Table:
    """Text in rows and columns."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""

    def __str__(self) -> str:
        lines = align([self.head, *self.rows], "<" * len(self.head), rule=True)
        return "\n".join([self.title, "", *lines, *textwrap.wrap(self.note, 100)])


def make_tables(results: StudyResults) -> list[Table]:
    """The data sets and the results of a study."""
    return [_tabulate_data(results), tabulate_results(results)]


def _tabulate_data(results: StudyResults) -> Table:
    """The paper's Table 1, from what was loaded."""
    rows = [
        [short_name(name), dimensionality(info.shape), *map(str, (info.classes, info.train, info.test))]
        for name, info in results.data.items()
    ]
    return Table("Data sets", list(TABLE_1), rows)


def tabulate_results(results: StudyResults) -> Table:
    """The step size of every cell, and the errors it ends at."""
    head = [*CELL_HEAD, "step size", "validation error", "training loss", "training error", "test error"]
    rows = []
    for choice in results.choices:
        best, records = choice.best, results.finals[choice.cell]
        if best is None:
            statuses = ", ".join(sorted({trial.status for trial in choice.tried}))
            rows.append([*_cell_columns(choice.cell), "none", statuses, "", "", ""])
            continue
        loss = summarize_last(records, "train_loss").plain()
        errors = [summarize_last(records, name).percent() for name in ("train_error", "test_error")]
        chosen = [f"{best.step_size:g}", f"{best.best_error:.2%}"]
        rows.append([*_cell_columns(choice.cell), *chosen, loss, *errors])
    study = results.study
    note = (
        f"After {study.epochs} epochs on all the training data; training loss and error are means over the "
        "last epoch's batches, each measured before its step."
    )
    if study.repeats > 1:
        note += f" Means over {study.repeats} seeds, and from the least to the largest."
    return Table("Results", head, rows, note)


def tabulate_choices(choices: Sequence[Choice]) -> Table:
    """The validation error of every step size that was tried.

    Args:
        choices: What :func:`pathsgd.paper.sweep` returns.

    Returns:
        A table; ``print`` shows it.

    Example:
        >>> tried = [Trial(0.1, "done", 0.021, 7, "", ""), Trial(1.0, "diverged", 1.0, 0, "", "")]
        >>> print(tabulate_choices([Choice(Cell("digits", 0.0, "balanced", "sgd"), 0.1, tried)]))
        Validation error by step size, the chosen one in brackets
        <BLANKLINE>
        data set  dropout  start     method  1         0.1
        ------------------------------------------------------
        digits    0        balanced  SGD     diverged  [2.10%]
    """
    sizes = sorted({trial.step_size for choice in choices for trial in choice.tried}, reverse=True)
    rows = []
    for choice in choices:
        tried = {trial.step_size: _error_or_status(trial) for trial in choice.tried}
        marked = (f"[{tried[s]}]" if s == choice.step_size else tried.get(s, "") for s in sizes)
        rows.append([*_cell_columns(choice.cell), *marked])
    head = [*CELL_HEAD, *(f"{size:g}" for size in sizes)]
    return Table("Validation error by step size, the chosen one in brackets", head, rows)


def _cell_columns(cell: Cell) -> list[str]:
    return [short_name(cell.dataset), f"{cell.dropout:g}", cell.init, METHODS[cell.method].label]


def _error_or_status(trial: Trial) -> str:
    return f"{trial.best_error:.2%}" if trial.status == "done" else trial.status


def describe_claims(claims: Sequence[Claim]) -> str:
    """The claims with their verdicts and evidence, for a terminal."""
    lines = ["The paper's claims", ""]
    for claim in claims:
        head = f"{claim.number}. {claim.verdict.upper()}: {claim.text}"
        lines += textwrap.wrap(head, 110, subsequent_indent="   ")
        for text in claim.evidence:
            lines += textwrap.wrap(text, 110, initial_indent="     - ", subsequent_indent="       ")
    return "\n".join(lines)


def summarize_study(results: StudyResults) -> str:
    """The tables and the claims of a study, for a terminal.

    Args:
        results: A finished study.

    Returns:
        Several lines of text.
    """
    return "\n\n".join([*map(str, make_tables(results)), describe_claims(judge_claims(results))])
