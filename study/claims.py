"""The paper's seven claims, judged by the rule of results/paper/verdict-rule.md, with all comparisons."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import scipy.stats

from study.config import Cell
from study.data import short_name
from study.figures import explosion, poor_updates
from study.methods import METHODS
from study.runs import RunRecord, StudyResults

Verdict = Literal["agrees", "disagrees", "cannot be told", "not tested"]
Pair = tuple[RunRecord | None, RunRecord | None]  # two runs of one seed; None where no step size ended well
LAST_EPOCHS = 5  # epochs at the end of a run whose mean is its final error or loss: one epoch alone wobbles
CONFIDENCE = 0.95
NOT_COUNTED = "not part of the claim"
ALMOST_ZERO = 1e-12  # errors and losses below it count as this in ratios


def mean_of_last(run: RunRecord, name: str) -> float:
    return statistics.fmean(run.curve(name)[1:][-LAST_EPOCHS:])


def find_common_loss(runs: Sequence[RunRecord]) -> float:
    """Lowest training loss that all of these runs reach."""
    return max(min(run.curve("train_loss")[1:]) for run in runs)


def count_epochs_to(loss: float, run: RunRecord) -> int | None:
    """Epochs that a run takes to a training loss; None if it does not reach it."""
    losses = enumerate(run.curve("train_loss"))
    return next((epoch for epoch, reached in losses if epoch and reached <= loss), None)


class Interval(NamedTuple):
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


def confidence_interval(values: Sequence[float]) -> Interval | None:
    """Interval of the mean, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    t = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    width = t * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - width, mean + width)


@dataclass(frozen=True)
class Comparison:
    """A row of the table of all comparisons."""

    where: str
    measured: str  # the mean effect with its 95% confidence interval over the seeds
    by_seed: str
    agrees_if: str
    verdict: Verdict
    note: str = ""
    counts: bool = True  # whether it counts for the claim
    undecided: list[Cell] = field(default_factory=list)  # the cells of which more seeds may decide it


@dataclass(frozen=True)
class Effect:
    """Difference between the first run of a pair and the second, seed by seed."""

    name: str
    names: tuple[str, str]  # names of the first and the second run
    by_seed: list[float]  # inf where the first of a pair diverged, -inf where the second did, nan where both
    above: float = -math.inf  # the paper says that the effect is above this and below the next
    below: float = math.inf
    ratio: bool = True

    @property
    def interval(self) -> Interval | None:
        """None for fewer than two seeds that count, or where only some of them have diverged."""
        counted = [d for d in self.by_seed if not math.isnan(d)]
        if not any(map(math.isinf, counted)):
            return confidence_interval(counted)
        alike = len(counted) > 1 and len(set(counted)) == 1
        return Interval(counted[0], counted[0], counted[0]) if alike else None

    @property
    def verdict(self) -> Verdict:
        return self._judge(self.interval)

    @property
    def is_close(self) -> bool:
        """Whether an interval half as wide would decide what this one does not."""
        if self.interval is None or self.verdict != "cannot be told":
            return False
        mean, low, high = self.interval
        return self._judge(Interval(mean, (mean + low) / 2, (mean + high) / 2)) != "cannot be told"

    def _judge(self, interval: Interval | None) -> Verdict:
        if interval is None:
            return "cannot be told"
        if interval.high < self.above or interval.low > self.below:
            return "disagrees"
        inside = interval.low > self.above or self.above == -math.inf
        inside = inside and (interval.high < self.below or self.below == math.inf)
        return "agrees" if inside else "cannot be told"

    def describe(self) -> str:
        """Mean with its interval, or why there is none."""
        counted = [d for d in self.by_seed if not math.isnan(d)]
        lost = [(name, counted.count(d)) for name, d in zip(self.names, (math.inf, -math.inf), strict=True)]
        if any(count for _, count in lost):
            who = " and ".join(f"{name} diverged in {count}" for name, count in lost if count)
            return f"{who} of {len(self.by_seed)} seed{'s' * (len(self.by_seed) > 1)}"
        if not counted:
            return "both diverged in every seed"
        if self.interval is None:
            return f"{self.name} {self._format(counted[0])}, one seed: no interval"
        mean, low, high = map(self._format, self.interval)
        return f"{self.name} {mean} ({low} to {high})"

    def describe_seeds(self) -> str:
        return ", ".join(map(self._format, self.by_seed))

    def describe_bounds(self) -> str:
        low, high = self._format(self.above), self._format(self.below)
        if math.isfinite(self.above) and math.isfinite(self.below):
            return f"from {low} to {high}"
        return f"below {high}" if math.isfinite(self.below) else f"above {low}"

    def _format(self, d: float) -> str:
        if math.isnan(d):
            return "both diverged"
        if math.isinf(d):
            return f"{self.names[d < 0]} diverged"
        return f"{math.exp(min(d, 700.0)):.3g}" if self.ratio else f"{100 * d:.2f}".replace("-0.00", "0.00")


def measure(pairs: Sequence[Pair], effect: Callable[[RunRecord, RunRecord], float]) -> list[float]:
    """Measures the effect in each pair; a run that diverged has lost."""

    def measure_pair(pair: Pair) -> float:
        done = [run for run in pair if run is not None and run.status == "done"]
        if len(done) == 2:
            return effect(*done)
        if not done:
            return math.nan
        return -math.inf if done[0] is pair[0] else math.inf

    return list(map(measure_pair, pairs))


def log_ratio(first: float, second: float) -> float:
    return math.log(max(first, ALMOST_ZERO) / max(second, ALMOST_ZERO))


def compare(where: str, cells: Sequence[Cell], *effects: Effect, counts: bool = True) -> Comparison:
    """Agrees if one of the effects does, and disagrees if all of them do."""
    verdicts = {effect.verdict for effect in effects}
    open_or_agrees: Verdict = "agrees" if "agrees" in verdicts else "cannot be told"
    verdict: Verdict = "disagrees" if verdicts == {"disagrees"} else open_or_agrees
    close = verdict == "cannot be told" and any(effect.is_close for effect in effects)
    notes = [NOT_COUNTED] * (not counts) + ["more seeds may tell"] * close
    measured = dict.fromkeys(effect.describe() for effect in effects)  # who diverged is said once
    seeds = dict.fromkeys(effect.describe_seeds() for effect in effects)
    bounds = [f"{effect.name} {effect.describe_bounds()}" for effect in effects]
    agrees_if = " or ".join(bounds) if len(effects) > 1 else effects[0].describe_bounds()
    return Comparison(
        where, "; ".join(measured), "; ".join(seeds), agrees_if, verdict, ", ".join(notes), counts,
        list(cells) if close else [],
    )  # fmt: skip


def state(where: str, measured: str, agrees_if: str, holds: bool, counts: bool = True) -> Comparison:
    verdict: Verdict = "agrees" if holds else "disagrees"
    return Comparison(where, measured, "", agrees_if, verdict, "" if counts else NOT_COUNTED, counts)


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
SAME = 0.005  # how far apart the test errors of the same curves may be, in the mean over the epochs
HURT, HURT_LOSS = 1.25, 2.0
"""Multiples of the balanced start's test error, and training loss, that are a considerable harm."""
SLIGHTLY = 0.01  # how much lower an error is that is slightly lower
ABOUT = 1.04  # how many times (B+1)/B still is about that


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, its verdict, and the comparisons behind it."""

    number: int
    text: str
    verdict: Verdict  # agrees: all comparisons do; disagrees: one does; not tested: a part was not run
    comparisons: list[Comparison]
    not_run: list[str]  # what is missing for the claim to be tested

    @property
    def share(self) -> str:
        """How many comparisons agree, of those that count. The verdict is stricter: one can decide it."""
        verdicts = [comparison.verdict for comparison in self.comparisons if comparison.counts]
        return f"{verdicts.count('agrees')} of {len(verdicts)}" if verdicts else ""


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
    missing = [METHODS[name].label for name in methods if name not in results.study.methods]
    return missing + [f"the {init} start" for init in inits if init not in results.study.inits]


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
        effect = Effect("epochs ratio", ("Path-SGD", label), measure(pairs, compare_epochs), below=0.0)
        yield compare(_where(cells[1], f"Path-SGD / {label}"), cells, effect, counts=_counts(cells[1]))


def compare_epochs(first: RunRecord, second: RunRecord) -> float:
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
    return not (cell.dropout and cell.dataset == "mnist")  # which the paper excepts


def _figure_1(results: StudyResults, dropouts: Sequence[float]) -> Iterator[Comparison]:
    on_mnist = "mnist" in results.study.datasets  # the paper's; else what is there
    for harm in _harm(results, ["sgd"], dropouts):
        if harm.where.startswith("mnist,") or not on_mnist:
            yield dataclasses.replace(harm, where=f"(a) {harm.where}")
    chain, (_, sgd_gap, path_gap) = explosion(), poor_updates().gaps
    yield state("(b) one step on a chain", str(chain), "SGD explodes, Path-SGD does not", chain.exploded)
    yield state(
        "(c) one step on two equivalent networks",
        f"outputs apart by {sgd_gap:.3g} after SGD, by {round(path_gap, 12):.1g} after Path-SGD",
        "apart after SGD, equal after Path-SGD",
        sgd_gap > 1 and path_gap < 1e-12,
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
