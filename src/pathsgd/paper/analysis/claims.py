"""The paper's seven claims, judged by the rule of docs/verdict-rule.md, with every comparison behind them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pathsgd.paper.analysis.comparison import (
    Comparison,
    Effect,
    Pair,
    Verdict,
    compare,
    log_ratio,
    measure,
    state,
)
from pathsgd.paper.analysis.statistics import count_epochs, mean_of_last
from pathsgd.paper.config import Cell
from pathsgd.paper.data.dataset import short_name
from pathsgd.paper.figures.one_step_examples import explosion, poor_updates
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.records.run_folder import RunRecord
from pathsgd.paper.records.study_results import StudyResults

PATH, RIVALS, STARTS = "path-sgd", ("sgd", "adagrad"), ("balanced", "unbalanced")
UNBALANCED_FIRST = ("unbalanced", "balanced")
TEXTS = {
    1: "Path-SGD gives the same curves from a balanced and from an unbalanced start.",
    2: "An unbalanced start hurts SGD and AdaGrad considerably.",
    3: "Balanced, without dropout: Path-SGD reaches a training loss in fewer epochs than SGD and AdaGrad.",
    4: "Its final test error is lower, except on CIFAR-100, where SGD's is slightly lower.",
    5: "With dropout, except on MNIST, it is faster and ends at a lower test error.",
    6: "Figure 1: SGD fails on unbalanced networks: (a) in training, (b) by explosion, (c) by poor updates.",
    7: "A Path-SGD step costs about (B+1)/B of an SGD step, with B points in a batch.",
}
SAME = 0.005
"""How far apart the test errors of the same curves may be, in the mean over the epochs."""
HURT, HURT_LOSS = 1.25, 2.0
"""How many times the test error, or the training loss, of the balanced start is a considerable harm."""
SLIGHTLY = 0.01
"""How much lower an error is that is slightly lower."""
ABOUT = 1.04
"""How many times (B+1)/B still is about that."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, its verdict, and the comparisons behind it.

    Attributes:
        number: 1 to 7.
        text: The claim.
        verdict: ``agrees``: all comparisons agree with the paper; ``disagrees``: one does not; ``cannot be
            told`` from these runs; ``not tested``: a part was not run, and the rest does not disagree.
        comparisons: Every one of them with its numbers.
        not_run: What is missing for the claim to be tested.
    """

    number: int
    text: str
    verdict: Verdict
    comparisons: list[Comparison]
    not_run: list[str]


def judge_claims(results: StudyResults) -> list[Claim]:
    """Judges the paper's seven claims.

    Args:
        results: A finished study, as :func:`pathsgd.paper.reproduce` returns it.

    Returns:
        All seven in the order of the paper, each with its verdict and its comparisons.
    """
    study = results.study
    plain, dropped = [0.0] * (0.0 in study.dropouts), [d for d in study.dropouts if d]
    no_plain, no_dropped = ["without dropout"] * (not plain), ["with dropout"] * (not dropped)
    rivals = _find_missing(results, (PATH, *RIVALS), ["balanced"])
    return [
        _judge(1, _same_curves(results), _find_missing(results, [PATH], STARTS)),
        _judge(2, _harm(results, RIVALS, study.dropouts), _find_missing(results, RIVALS, STARTS)),
        _judge(3, _speed(results, plain), rivals + no_plain),
        _judge(4, _errors(results, plain), rivals + no_plain),
        _judge(5, [*_speed(results, dropped), *_errors(results, dropped)], rivals + no_dropped),
        _judge(6, _figure_1(results, plain), _find_missing(results, ["sgd"], STARTS) + no_plain),
        _judge(7, _step_cost(results), []),
    ]


def find_undecided(results: StudyResults) -> set[Cell]:
    """Cells of which further seeds may decide a verdict, by the first seeds alone, whatever else was run."""
    finals = {cell: runs[: results.study.repeats] for cell, runs in results.finals.items()}
    claims = judge_claims(dataclasses.replace(results, finals=finals))
    return {cell for claim in claims for c in claim.comparisons if c.counts for cell in c.undecided}


def _judge(number: int, comparisons: Iterable[Comparison], not_run: list[str]) -> Claim:
    rows = list(comparisons)
    found = {row.verdict for row in rows if row.counts}
    verdict: Verdict = "agrees" if found == {"agrees"} else "cannot be told"
    if not found or not_run:
        verdict = "not tested"
    if "disagrees" in found:
        verdict = "disagrees"
    return Claim(number, TEXTS[number], verdict, rows, not_run)


def _find_missing(results: StudyResults, methods: Sequence[str], inits: Sequence[str]) -> list[str]:
    """What a claim speaks of and the study has not run."""
    study = results.study
    return [METHODS[name].label for name in methods if name not in study.methods] + [
        f"the {init} start" for init in inits if init not in study.inits
    ]


def _pair_up(results: StudyResults, first: Cell, second: Cell) -> list[Pair]:
    """The runs of each seed; nothing if one of the cells was not run."""
    if first not in results.finals or second not in results.finals:
        return []
    none: list[RunRecord | None] = [None] * (results.study.repeats + results.study.more_repeats)
    # One of them may have further seeds that the other has not.
    return list(zip(results.finals[first] or none, results.finals[second] or none, strict=False))


def _where(dataset: str, dropout: float, what: str) -> str:
    return ", ".join(filter(None, [short_name(dataset), f"dropout {dropout:g}" if dropout else "", what]))


def _same_curves(results: StudyResults) -> Iterator[Comparison]:
    for cell, own in results.finals.items():
        if cell.init != "balanced" or not METHODS[cell.method].invariant:
            continue
        counts, where = cell.method == PATH, _where(cell.dataset, cell.dropout, METHODS[cell.method].label)
        cells = dataclasses.replace(cell, init="unbalanced"), cell
        pairs = _pair_up(results, *cells)
        if pairs:
            gaps = measure(pairs, _mean_gap)
            effect = Effect("test error, points", UNBALANCED_FIRST, gaps, -SAME, SAME, ratio=False)
            yield compare(f"{where}, unbalanced - balanced, all epochs", cells, effect, counts=counts)
        if cell in results.exact:
            equal = results.exact[cell].lines == own[0].lines
            said = "equal bit for bit" if equal else "NOT equal"
            yield state(f"{where}, rescaled by powers of two", said, "equal bit for bit", equal, counts)


def _mean_gap(first: RunRecord, second: RunRecord) -> float:
    """Between the test errors, in the mean over the epochs."""
    return statistics.fmean(a - b for a, b in zip(first.errors[1:], second.errors[1:], strict=True))


def _harm(results: StudyResults, methods: Sequence[str], dropouts: Sequence[float]) -> Iterator[Comparison]:
    for dataset, dropout, method in itertools.product(results.study.datasets, dropouts, methods):
        cells = [Cell(dataset, dropout, init, method) for init in ("unbalanced", "balanced")]
        pairs = _pair_up(results, *cells)
        if pairs:
            errors, losses = (measure(pairs, _log_ratio_of(name)) for name in ("test_error", "train_loss"))
            yield compare(
                _where(dataset, dropout, f"{METHODS[method].label}, unbalanced / balanced"),
                cells,
                Effect("test error ratio", UNBALANCED_FIRST, errors, above=math.log(HURT)),
                Effect("training loss ratio", UNBALANCED_FIRST, losses, above=math.log(HURT_LOSS)),
            )


def _log_ratio_of(name: str) -> Callable[[RunRecord, RunRecord], float]:
    return lambda first, second: log_ratio(mean_of_last(first, name), mean_of_last(second, name))


def _speed(results: StudyResults, dropouts: Sequence[float]) -> Iterator[Comparison]:
    for cell, label, pairs in _find_rivals(results, dropouts):
        found = measure(pairs, lambda own, other: log_ratio(*count_epochs(own, other)))
        effect = Effect("epochs ratio", ("Path-SGD", label), found, below=0.0)
        where = _where(cell.dataset, cell.dropout, f"Path-SGD / {label}")
        yield compare(where, _with_path(cell), effect, counts=_counts(cell))


def _errors(results: StudyResults, dropouts: Sequence[float]) -> Iterator[Comparison]:
    for cell, label, pairs in _find_rivals(results, dropouts):
        found = measure(pairs, lambda a, b: mean_of_last(a, "test_error") - mean_of_last(b, "test_error"))
        slightly = (cell.dataset, cell.dropout, cell.method) == ("cifar100", 0.0, "sgd")
        above, below = (0.0, SLIGHTLY) if slightly else (-math.inf, 0.0)
        effect = Effect("test error, points", ("Path-SGD", label), found, above, below, ratio=False)
        where = _where(cell.dataset, cell.dropout, f"Path-SGD - {label}")
        yield compare(where, _with_path(cell), effect, counts=_counts(cell))


def _find_rivals(results: StudyResults, dropouts: Sequence[float]) -> Iterator[tuple[Cell, str, list[Pair]]]:
    """The cell of each rival, its label, and pairs of Path-SGD and the rival, balanced."""
    for dataset, dropout, rival in itertools.product(results.study.datasets, dropouts, RIVALS):
        cell = Cell(dataset, dropout, "balanced", rival)
        pairs = _pair_up(results, *_with_path(cell))
        if pairs:
            yield cell, METHODS[rival].label, pairs


def _with_path(rival: Cell) -> tuple[Cell, Cell]:
    return dataclasses.replace(rival, method=PATH), rival


def _counts(cell: Cell) -> bool:
    """The paper excepts MNIST with dropout."""
    return not (cell.dropout and cell.dataset == "mnist")


def _figure_1(results: StudyResults, dropouts: Sequence[float]) -> Iterator[Comparison]:
    on_mnist = "mnist" in results.study.datasets  # the paper's; else what is there
    for found in _harm(results, ["sgd"], dropouts):
        if found.where.startswith("mnist,") or not on_mnist:
            yield dataclasses.replace(found, where=f"(a) {found.where}")
    chain, poor = explosion(), poor_updates()
    yield state("(b) one step on a chain", str(chain), "SGD explodes, Path-SGD does not", chain.exploded)
    yield state(
        "(c) one step on two equivalent networks",
        f"outputs apart by {poor.sgd_gap:.3g} after SGD, by {round(poor.path_gap, 12):.1g} after Path-SGD",
        "apart after SGD, equal after Path-SGD",
        poor.sgd_gap > 1 and poor.path_gap < 1e-12,
    )


def _step_cost(results: StudyResults) -> Iterator[Comparison]:
    batch, cost = results.study.batch, results.cost
    if cost is not None:
        most = ABOUT * (batch + 1) / batch
        yield state(
            f"{cost.net} on {cost.device}, batch {batch}",
            f"a training step takes {cost.sgd_us:.0f} us with SGD (fused), {cost.path_us:.0f} us with "
            f"Path-SGD, {cost.ratio:.3f} times as long",
            f"below {most:.3f}",
            cost.ratio < most,
        )
