"""Tables of a study, the ranking of methods from one start, and all of it as text."""

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from study.claims import (
    LAST_EPOCHS,
    Claim,
    Effect,
    count_epochs_to,
    find_common_loss,
    judge_claims,
    log_ratio,
    mean_of_last,
    measure,
)
from study.config import Cell
from study.data import TABLE_1, dimensionality, short_name
from study.methods import METHODS
from study.runs import Choice, RunRecord, StudyResults

LEARNED = 0.5  # fraction of its training loss before the first step: a run that does not end below it failed
Runs = Mapping[str, Sequence[RunRecord | None]]  # of each method, seed by seed; None for a run that failed


@dataclass(frozen=True)
class Ranking:
    """Methods by one number, of which less is better."""

    name: str
    first: str | None  # the method with the lowest mean of those of which no seed failed
    behind: dict[str, Effect]  # how far every other method is behind it

    @property
    def undecided(self) -> list[str]:
        return [method for method, effect in self.behind.items() if effect.verdict != "agrees"]

    def describe(self, method: str) -> str:
        """Says how far a method is behind the first, and whether that can be told."""
        if method not in self.behind:
            return "first" if method == self.first else ""
        effect = self.behind[method]
        failed = effect.by_seed.count(math.inf)
        said = f"failed in {failed} of {len(effect.by_seed)} seeds" if failed else effect.describe().strip()
        return f"cannot be told: {said}" if method in self.undecided else said


@dataclass(frozen=True)
class Standings:
    dataset: str
    dropout: float
    epochs: dict[str, list[int | None]]  # to the loss that is raced to, seed by seed; None: failed
    rankings: list[
        Ranking
    ]  # by epochs to a training loss, by the final training loss, by the final test error


def rank_methods(results: StudyResults) -> list[Standings]:
    """Ranks methods from one start by the rule in results/outlook/README.md."""
    study = results.study
    (init,), standings = study.inits, []
    for dataset, dropout in itertools.product(study.datasets, study.dropouts):
        finals = {name: results.finals[Cell(dataset, dropout, init, name)] for name in study.methods}
        runs: dict[str, list[RunRecord | None]] = {}
        for name, records in finals.items():
            runs[name] = [run if _has_learned(run) else None for run in records] or [None] * study.repeats
        standings.append(_compare_all(dataset, dropout, runs))
    return standings


def _compare_all(dataset: str, dropout: float, runs: Runs) -> Standings:
    learned = [run for records in runs.values() for run in records if run is not None]
    loss = find_common_loss(learned) if learned else 0.0
    epochs = {
        name: [None if run is None else count_epochs_to(loss, run) for run in records]
        for name, records in runs.items()
    }
    rankings = [
        _rank(f"epochs to a training loss of {loss:.2g}", runs, lambda run: count_epochs_to(loss, run) or 0),
        _rank("final training loss", runs, lambda run: mean_of_last(run, "train_loss")),
        _rank("final test error", runs, lambda run: mean_of_last(run, "test_error"), ratio=False),
    ]
    return Standings(dataset, dropout, epochs, rankings)


def _has_learned(run: RunRecord) -> bool:
    return run.status == "done" and mean_of_last(run, "train_loss") < LEARNED * run.curve("train_loss")[0]


def _rank(name: str, runs: Runs, number: Callable[[RunRecord], float], ratio: bool = True) -> Ranking:
    def score(run: RunRecord) -> float:
        return log_ratio(number(run), 1.0) if ratio else number(run)

    whole = {method: [run for run in records if run is not None] for method, records in runs.items()}
    whole = {method: records for method, records in whole.items() if len(records) == len(runs[method])}
    first = min(whole, key=lambda method: fmean(map(score, whole[method])), default=None)
    behind = {}
    for method, records in runs.items():
        if first is not None and method != first:
            pairs = list(zip(records, whole[first], strict=True))
            by_seed = measure(pairs, lambda a, b: score(a) - score(b))
            behind[method] = Effect("", ("it", "the first"), by_seed, above=0.0, ratio=ratio)
    return Ranking(name, first, behind)


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
    rows = [
        [short_name(name), dimensionality(info.shape), *map(str, (info.classes, info.train, info.test))]
        for name, info in results.data.items()
    ]
    return Table("Data sets", list(TABLE_1), rows, results.note)


def tabulate_results(results: StudyResults) -> Table:
    rows = []
    for choice in results.choices:
        best, records = choice.best, results.finals[choice.cell]
        if best is None:
            statuses = ", ".join(sorted({trial.status for trial in choice.tried}))
            rows.append([*_cell_columns(choice.cell), "none", statuses, "", "", "", "", ""])
            continue
        done = [record for record in records if record.status == "done"]
        errors = ([100 * mean_of_last(run, name) for run in done] for name in ("train_error", "test_error"))
        numbers = [
            format_seeds([mean_of_last(run, "train_loss") for run in done]),
            *(format_seeds(values, "%") for values in (*errors, [100 * run.best[0] for run in done])),
            f"{len(records) - len(done)} of {len(records)}" if len(done) < len(records) else "",
        ]
        rows.append([*_cell_columns(choice.cell), f"{best.step_size:g}", f"{best.best_error:.2%}", *numbers])
    note = (
        f"{results.study.epochs} epochs on all the training data. Loss and errors are means over the last "
        f"{LAST_EPOCHS} epochs; those in training are measured on each batch before its step. The best test "
        "error is the lowest after any epoch, which only the test set itself can choose."
    )
    if results.seeds != "1":
        seeds = f"Means over those of {results.seeds} seeds that did not diverge"
        note += f" {seeds}, from the least to the largest."
    return Table("Results", CELL_HEAD + RESULTS_HEAD, rows, note)


def tabulate_epochs(results: StudyResults) -> list[Table]:
    epochs = {
        cell: [[count_epochs_to(loss, run) for run in runs] for loss in LOSSES]
        for cell, runs in results.finals.items()
        if cell.init == "balanced"
    }
    reached = [k for k in range(len(LOSSES)) if any(any(by_loss[k]) for by_loss in epochs.values())]
    rows = [
        [*_cell_columns(c), *(_format_epochs(by_loss[k]) for k in reached)] for c, by_loss in epochs.items()
    ]
    head = [*CELL_HEAD, *(f"{LOSSES[k]:g}" for k in reached)]
    note = "From the fastest to the slowest seed; nothing where a seed does not come so far."
    return [Table("Epochs to a training loss", head, rows, note)] if reached else []


def _format_epochs(by_seed: Sequence[int | None]) -> str:
    """Formats the least and the largest."""
    epochs = sorted({epoch for epoch in by_seed if epoch is not None})
    if not epochs or None in by_seed:
        return ""
    return f"{epochs[0]} to {epochs[-1]}" if len(epochs) > 1 else str(epochs[0])


def _tabulate_ranks(standings: Sequence[Standings]) -> Table:
    rows = [
        [short_name(one.dataset), f"{one.dropout:g}", METHODS[name].label, _format_epochs(epochs),
         *(ranking.describe(name) for ranking in one.rankings)]
        for one in standings
        for name, epochs in one.epochs.items()
    ]  # fmt: skip
    note = (
        "Epochs: to the lowest training loss that all reach but those that failed, from the fastest to the "
        "slowest seed. Ratios and differences to the first: means over the seeds with 95% intervals. It "
        "cannot be told where the interval reaches to the first, or where only some seeds failed: diverged, "
        f"or ended with a training loss that is not below {LEARNED:g} of what it began with."
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
    outcomes = {choice.cell: _outcomes(choice) for choice in choices}
    sizes = sorted({size for row in outcomes.values() for size in row}, reverse=True)
    rows = [[*_cell_columns(c), *(row.get(size, "") for size in sizes)] for c, row in outcomes.items()]
    head = [*CELL_HEAD, *(f"{size:g}" for size in sizes)]
    note = "In parentheses: tried because the largest won, and not used."
    note = note if any(choice.beyond for choice in choices) else ""
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
    """A line for each claim; the report has the comparisons."""
    lines = ["The paper's claims: verdict, comparisons that agree", ""]
    for claim in claims:
        share = f" ({claim.share})" if claim.share else ""
        missing = f" Not run: {', '.join(claim.not_run)}." if claim.not_run else ""
        head = f"{claim.number}. {claim.verdict.upper()}{share}: {claim.text}{missing}"
        lines += textwrap.wrap(head, 110, subsequent_indent="   ")
    return "\n".join(lines)


def explain_demo(results: StudyResults) -> str:
    return DEMO if results.study.datasets == ("digits",) and results.study.compares_starts else ""


def summarize_study(results: StudyResults) -> str:
    """Tables and claims of a study, for a terminal; no claims for a study from one start."""
    claims = describe_claims(judge_claims(results)) if results.study.compares_starts else ""
    demo = textwrap.fill(explain_demo(results), 110)
    return "\n\n".join(filter(None, [*map(str, make_tables(results)), claims, demo]))
