"""The paper's seven claims, judged by the rule of docs/verdict-rule.md, with every comparison behind them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from study.comparison import (
    Comparison,
    Effect,
    Pair,
    Verdict,
    compare,
    count_epochs_to,
    find_common_loss,
    log_ratio,
    mean_of_last,
    measure,
    state,
)
from study.config import Cell
from study.dataset import short_name
from study.methods import METHODS
from study.one_step_examples import explosion, poor_updates
from study.results import StudyResults
from study.runs import RunRecord

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
    """A claim of the paper, its verdict, and the comparisons behind it."""

    number: int
    text: str
    verdict: Verdict
    """``agrees``: all comparisons agree with the paper; ``disagrees``: one does not; ``cannot be told`` from
    these runs; ``not tested``: a part was not run, and the rest does not disagree."""
    comparisons: list[Comparison]
    not_run: list[str]
    """What is missing for the claim to be tested."""


def judge_claims(results: StudyResults) -> list[Claim]:
    """Judges the paper's seven claims, in its order, on a finished study."""
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
    verdicts = {row.verdict for row in rows if row.counts}
    verdict: Verdict = "agrees" if verdicts == {"agrees"} else "cannot be told"
    if not verdicts or not_run:
        verdict = "not tested"
    if "disagrees" in verdicts:
        verdict = "disagrees"
    return Claim(number, TEXTS[number], verdict, rows, not_run)


def _find_missing(results: StudyResults, methods: Sequence[str], inits: Sequence[str]) -> list[str]:
    """Lists what a claim speaks of and the study has not run."""
    study = results.study
    return [METHODS[name].label for name in methods if name not in study.methods] + [
        f"the {init} start" for init in inits if init not in study.inits
    ]


def _pair_up(results: StudyResults, first: Cell, second: Cell) -> list[Pair]:
    """Pairs the runs of each seed; nothing if one of the cells was not run."""
    if first not in results.finals or second not in results.finals:
        return []
    none: list[RunRecord | None] = [None] * (results.study.repeats + results.study.more_repeats)
    # One of them may have further seeds that the other has not.
    return list(zip(results.finals[first] or none, results.finals[second] or none, strict=False))


def _where(cell: Cell, text: str) -> str:
    dropout = f"dropout {cell.dropout:g}" if cell.dropout else ""
    return ", ".join(filter(None, [short_name(cell.dataset), dropout, text]))


def _same_curves(results: StudyResults) -> Iterator[Comparison]:
    for cell, runs in results.finals.items():
        if cell.init != "balanced" or not METHODS[cell.method].invariant:
            continue
        counts, where = cell.method == PATH, _where(cell, METHODS[cell.method].label)
        cells = dataclasses.replace(cell, init="unbalanced"), cell
        pairs = _pair_up(results, *cells)
        if pairs:
            gaps = measure(pairs, _mean_gap)
            effect = Effect("test error, points", UNBALANCED_FIRST, gaps, -SAME, SAME, ratio=False)
            yield compare(f"{where}, unbalanced - balanced, all epochs", cells, effect, counts=counts)
        if cell in results.exact:
            equal = results.exact[cell].lines == runs[0].lines
            said = "equal bit for bit" if equal else "NOT equal"
            yield state(f"{where}, rescaled by powers of two", said, "equal bit for bit", equal, counts)


def _mean_gap(first: RunRecord, second: RunRecord) -> float:
    """Gap between the test errors, in the mean over the epochs."""
    return statistics.fmean(a - b for a, b in zip(first.errors[1:], second.errors[1:], strict=True))


def _harm(results: StudyResults, methods: Sequence[str], dropouts: Sequence[float]) -> Iterator[Comparison]:
    for dataset, dropout, method in itertools.product(results.study.datasets, dropouts, methods):
        balanced = Cell(dataset, dropout, "balanced", method)
        cells = dataclasses.replace(balanced, init="unbalanced"), balanced
        pairs = _pair_up(results, *cells)
        if pairs:
            errors, losses = (measure(pairs, _log_ratio_of(name)) for name in ("test_error", "train_loss"))
            yield compare(
                _where(balanced, f"{METHODS[method].label}, unbalanced / balanced"),
                cells,
                Effect("test error ratio", UNBALANCED_FIRST, errors, above=math.log(HURT)),
                Effect("training loss ratio", UNBALANCED_FIRST, losses, above=math.log(HURT_LOSS)),
            )


def _log_ratio_of(name: str) -> Callable[[RunRecord, RunRecord], float]:
    return lambda first, second: log_ratio(mean_of_last(first, name), mean_of_last(second, name))


def _speed(results: StudyResults, dropouts: Sequence[float]) -> Iterator[Comparison]:
    for cells, label, pairs in _find_rivals(results, dropouts):
        effect = Effect("epochs ratio", ("Path-SGD", label), measure(pairs, _compare_epochs), below=0.0)
        yield compare(_where(cells[1], f"Path-SGD / {label}"), cells, effect, counts=_counts(cells[1]))


def _compare_epochs(first: RunRecord, second: RunRecord) -> float:
    """Ratio of the epochs that each of two runs takes to the lowest training loss that both reach."""
    loss = find_common_loss([first, second])
    return log_ratio(count_epochs_to(loss, first) or 0, count_epochs_to(loss, second) or 0)


def _errors(results: StudyResults, dropouts: Sequence[float]) -> Iterator[Comparison]:
    for cells, label, pairs in _find_rivals(results, dropouts):
        gaps = measure(pairs, lambda a, b: mean_of_last(a, "test_error") - mean_of_last(b, "test_error"))
        slightly = (cells[1].dataset, cells[1].dropout, cells[1].method) == ("cifar100", 0.0, "sgd")
        above, below = (0.0, SLIGHTLY) if slightly else (-math.inf, 0.0)
        effect = Effect("test error, points", ("Path-SGD", label), gaps, above, below, ratio=False)
        yield compare(_where(cells[1], f"Path-SGD - {label}"), cells, effect, counts=_counts(cells[1]))


def _find_rivals(
    results: StudyResults, dropouts: Sequence[float]
) -> Iterator[tuple[tuple[Cell, Cell], str, list[Pair]]]:
    """Cells of Path-SGD and of each rival, the rival's label, and pairs of their runs, balanced."""
    for dataset, dropout, rival in itertools.product(results.study.datasets, dropouts, RIVALS):
        cell = Cell(dataset, dropout, "balanced", rival)
        cells = dataclasses.replace(cell, method=PATH), cell
        pairs = _pair_up(results, *cells)
        if pairs:
            yield cells, METHODS[rival].label, pairs


def _counts(cell: Cell) -> bool:
    """The paper excepts MNIST with dropout."""
    return not (cell.dropout and cell.dataset == "mnist")


def _figure_1(results: StudyResults, dropouts: Sequence[float]) -> Iterator[Comparison]:
    on_mnist = "mnist" in results.study.datasets  # the paper's; else what is there
    for harm in _harm(results, ["sgd"], dropouts):
        if harm.where.startswith("mnist,") or not on_mnist:
            yield dataclasses.replace(harm, where=f"(a) {harm.where}")
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
