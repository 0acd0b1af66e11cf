"""Tables of a study, and tables and claims as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from study.claims import Claim, find_undecided, judge_claims
from study.comparison import LAST_EPOCHS, count_epochs_to, mean_of_last
from study.config import Cell
from study.dataset import TABLE_1, dimensionality, short_name
from study.methods import METHODS
from study.ranking import LEARNED, Standings, rank_methods
from study.results import Choice, StudyResults, describe

CELL_HEAD = ["data set", "dropout", "start", "method"]
RESULTS_HEAD = ["step size", "validation error", "training loss", "training error", "test error",
                "best test error", "diverged"]  # fmt: skip
COMPARISON_HEAD = ["compared", "mean and 95% interval", "each seed", "agrees if", "verdict"]
RANKS_HEAD = ["data set", "dropout", "method", "epochs", "epochs, ratio", "final training loss, ratio",
              "final test error, points"]  # fmt: skip
LOSSES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)

DEMO = (
    "What the verdicts mean: each says whether a small network on 1797 small images shows what the paper saw "
    'with large networks on large data sets; none is a test of the library. Expect "disagrees" and '
    '"cannot be told" for claims 2 to 6, since every method soon learns these images and seeds differ as '
    "much as methods, and for claim 7, since the steps of so small a network are mostly overhead. Claim 1 is "
    "what Path-SGD promises everywhere: it trains alike from weights that are rescaled without changing what "
    "the network computes."
)


def align(rows: Sequence[Sequence[str]], sides: str = "") -> list[str]:
    """Rows as lines, each column aligned to its side, < or >."""
    sides = sides or "<" * len(rows[0])
    widths = [max(len(row[k]) for row in rows) for k in range(len(sides))]
    return [
        "  ".join(f"{cell:{side}{n}}" for cell, side, n in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


@dataclass(frozen=True)
class Table:
    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""

    def __str__(self) -> str:
        head, *lines = align([self.head, *self.rows])
        rule = "-" * max(map(len, [head, *lines]))
        return "\n".join([self.title, "", head, rule, *lines, *textwrap.wrap(self.note, 100)])


def make_tables(results: StudyResults) -> list[Table]:
    """Data sets and results of a study; of one from a single start also which method is first."""
    tables = [_tabulate_data(results), tabulate_results(results), *tabulate_epochs(results)]
    if results.study.compares_starts or len(results.study.methods) < 2:
        return tables
    standings = rank_methods(results)
    return [*tables, _tabulate_ranks(standings), _tabulate_first(standings)]


def _tabulate_data(results: StudyResults) -> Table:
    """The paper's Table 1, from what was loaded."""
    rows = [
        [short_name(name), dimensionality(info.shape), *map(str, (info.classes, info.train, info.test))]
        for name, info in results.data.items()
    ]
    return Table("Data sets", list(TABLE_1), rows, results.note)


def tabulate_results(results: StudyResults) -> Table:
    """Step size of every cell, and the errors it ends at."""
    rows = []
    for choice in results.choices:
        best, records = choice.best, results.finals[choice.cell]
        if best is None:
            statuses = ", ".join(sorted({trial.status for trial in choice.tried}))
            rows.append([*_cell_columns(choice.cell), "none", statuses, "", "", "", "", ""])
            continue
        done = [record for record in records if record.status == "done"]
        numbers = [
            format_seeds([mean_of_last(run, "train_loss") for run in done]),
            format_seeds([100 * mean_of_last(run, "train_error") for run in done], "%"),
            format_seeds([100 * mean_of_last(run, "test_error") for run in done], "%"),
            format_seeds([100 * run.best[0] for run in done], "%"),
            f"{len(records) - len(done)} of {len(records)}" if len(done) < len(records) else "",
        ]
        rows.append([*_cell_columns(choice.cell), f"{best.step_size:g}", f"{best.best_error:.2%}", *numbers])
    note = (
        f"{results.study.epochs} epochs on all the training data. Loss and errors are means over the last "
        f"{LAST_EPOCHS} epochs; those in training are measured on each batch before its step. The best test "
        "error is the lowest after any epoch, which only the test set itself can choose."
    )
    if results.seeds != "1":
        note += (
            f" Means over those of {results.seeds} seeds that did not diverge, from the least to the largest."
        )
    return Table("Results", CELL_HEAD + RESULTS_HEAD, rows, note)


def tabulate_epochs(results: StudyResults) -> list[Table]:
    """Speed of each balanced cell on its way: who is ahead may depend on the loss that is raced to."""
    epochs = {
        cell: [[count_epochs_to(loss, run) for run in runs] for loss in LOSSES]
        for cell, runs in results.finals.items()
        if cell.init == "balanced"
    }
    reached = [k for k in range(len(LOSSES)) if any(any(by_loss[k]) for by_loss in epochs.values())]
    rows = [
        [*_cell_columns(cell), *(_format_epochs(by_loss[k]) for k in reached)]
        for cell, by_loss in epochs.items()
    ]
    head = [*CELL_HEAD, *(f"{LOSSES[k]:g}" for k in reached)]
    note = "From the fastest to the slowest seed; nothing where a seed does not come so far."
    return [Table("Epochs to a training loss", head, rows, note)] if reached else []


def _format_epochs(by_seed: Sequence[int | None]) -> str:
    """Formats the least and the largest.

    >>> _format_epochs([8, 8]), _format_epochs([15, 14]), _format_epochs([30, None])
    ('8', '14 to 15', '')
    """
    epochs = [epoch for epoch in by_seed if epoch is not None]
    if not epochs or len(epochs) < len(by_seed):
        return ""
    least, largest = min(epochs), max(epochs)
    return str(least) if least == largest else f"{least} to {largest}"


def _tabulate_ranks(standings: Sequence[Standings]) -> Table:
    """Every method against the first."""
    rows = [
        [short_name(one.dataset), f"{one.dropout:g}", METHODS[name].label, _format_epochs(epochs),
         *(ranking.describe(name) for ranking in one.rankings)]
        for one in standings
        for name, epochs in one.epochs.items()
    ]  # fmt: skip
    note = (
        "Epochs: to the lowest training loss that all reach but those that failed, from the fastest to the "
        "slowest seed. "
        "Ratios and differences to the first: means over the seeds with 95% intervals. It cannot be told "
        "where the interval reaches to the first, or where only some seeds failed: diverged, or ended with a "
        f"training loss that is not below {LEARNED:g} of what it began with."
    )
    return Table("Methods against the first", RANKS_HEAD, rows, note)


def _tabulate_first(standings: Sequence[Standings]) -> Table:
    def list_labels(methods: Sequence[str | None]) -> str:
        return "; ".join(METHODS[name].label for name in methods if name) or "none"

    rows = [
        [short_name(one.dataset), f"{one.dropout:g}", ranking.name, list_labels([ranking.first]),
         list_labels(ranking.undecided)]
        for one in standings
        for ranking in one.rankings
    ]  # fmt: skip
    head = ["data set", "dropout", "by", "first", "cannot be told from"]
    return Table("Which method is first", head, rows, "Intervals are not widened for the number of methods.")


def format_seeds(values: Sequence[float], unit: str = "") -> str:
    """Formats the mean over seeds, the least and the largest.

    >>> format_seeds([1.0, 3.0], "%"), format_seeds([2e-5, 3.1e-5]), format_seeds([2.0]), format_seeds([])
    ('2.00% (1.00 to 3.00)', '2.5e-05 (2e-05 to 3.1e-05)', '2', '')
    """
    if not values:
        return ""
    numbers = [fmean(values), min(values), max(values)]
    mean, least, largest = (f"{value:.2f}" if unit else f"{value:.2g}" for value in numbers)
    return mean + unit + (f" ({least} to {largest})" if least != largest else "")


def tabulate_choices(choices: Sequence[Choice]) -> Table:
    """Validation error of every step size that was tried."""
    outcomes = [_outcomes(choice) for choice in choices]
    sizes = sorted({size for row in outcomes for size in row}, reverse=True)
    rows = [
        [*_cell_columns(choice.cell), *(row.get(size, "") for size in sizes)]
        for choice, row in zip(choices, outcomes, strict=True)
    ]
    head = [*CELL_HEAD, *(f"{size:g}" for size in sizes)]
    beyond = any(choice.beyond for choice in choices)
    note = "In parentheses: tried because the largest won, and not used." if beyond else ""
    return Table("Validation error by step size, the chosen one in brackets", head, rows, note)


def _outcomes(choice: Choice) -> dict[float, str]:
    outcomes = {trial.step_size: trial.outcome for trial in choice.tried}
    if choice.best is not None:
        outcomes[choice.best.step_size] = f"[{choice.best.outcome}]"
    if choice.beyond is not None:
        outcomes[choice.beyond.step_size] = f"({choice.beyond.outcome})"
    return outcomes


def _cell_columns(cell: Cell) -> list[str]:
    return [short_name(cell.dataset), f"{cell.dropout:g}", cell.init, METHODS[cell.method].label]


def describe_claims(claims: Sequence[Claim]) -> str:
    """Claims with their verdicts and comparisons, for a terminal."""
    lines = ["The paper's claims", ""]
    for claim in claims:
        head = f"{claim.number}. {claim.verdict.upper()}: {claim.text}"
        lines += textwrap.wrap(head, 110, subsequent_indent="   ")
        said = [
            f"{c.verdict}{c.note and f' ({c.note})'}: {c.where}: {c.measured}; agrees if {c.agrees_if}"
            for c in claim.comparisons
        ]
        for text in [*said, *([f"not run: {', '.join(claim.not_run)}"] if claim.not_run else [])]:
            lines += textwrap.wrap(text, 110, initial_indent="     - ", subsequent_indent="       ")
    return "\n".join(lines)


def list_missing(results: StudyResults) -> list[str]:
    """Cells that a study has left to run."""
    study, undecided = results.study, find_undecided(results) if results.study.more_repeats else set()
    seeds = study.repeats + study.more_repeats
    short = [cell for cell, runs in results.finals.items() if cell in undecided and 0 < len(runs) < seeds]
    return [f"{describe(cell)}: further seeds may decide a verdict and have not been run" for cell in short]


def explain_demo(results: StudyResults) -> str:
    """Explains the verdicts on the digits to a newcomer; empty for other data sets."""
    return DEMO if results.study.datasets == ("digits",) and results.study.compares_starts else ""


def summarize_study(results: StudyResults) -> str:
    """Tables and claims of a study, for a terminal; no claims for a study from one start."""
    missing = list_missing(results)
    progress = "\n".join(["In progress", "", *missing]) if missing else ""
    claims = describe_claims(judge_claims(results)) if results.study.compares_starts else ""
    demo = textwrap.fill(explain_demo(results), 110)
    return "\n\n".join(filter(None, [*map(str, make_tables(results)), progress, claims, demo]))
