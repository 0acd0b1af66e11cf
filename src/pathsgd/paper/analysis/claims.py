"""The paper's seven claims, each held, not held or not tested, with its numbers.

What "considerably", "faster" and "about" mean is fixed here, for all data sets alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pathsgd.paper.analysis.comparison import PATH, RIVALS, compare_with_rivals
from pathsgd.paper.analysis.statistics import MeanAndRange, end_alike, measure_gaps, summarize_last
from pathsgd.paper.config import Cell
from pathsgd.paper.data.dataset import short_name
from pathsgd.paper.figures.one_step_examples import explosion, poor_updates
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.records.run_folder import RunRecord
from pathsgd.paper.records.study_results import StudyResults

Verdict = Literal["held", "not held", "not tested"]
AGAINST, NOT_COUNTED = "AGAINST: ", "NOT COUNTED: "
CLOSE, CLOSE_PART = 0.005, 0.1
"""How far curves that differ by rounding alone may be apart, in the mean over the epochs: test errors, and
test errors and training losses as a part of their own mean.

Not after the last epoch: with large steps rounding is soon amplified to the size of a run's own variation. On
CIFAR-100 the errors after the last epoch are 0.7 points apart, where two epochs of one run are 0.5 apart.
"""
HURT, HURT_LOSS = 1.25, 2.0
"""How many times the test error, or the training loss, of the balanced start is a considerable harm."""
SLIGHTLY = 1.05
"""How many times as high the other may be where an error is slightly lower."""
ABOUT = 1.04
"""How many times (B+1)/B still is about that."""
BOTH_STARTS = ("balanced", "unbalanced")


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, its verdict, and the numbers behind it.

    Attributes:
        number: 1 to 7.
        text: The claim.
        verdict: ``held``, ``not held`` or ``not tested``.
        evidence: One line for each measurement, marked if it is against the claim or does not count.
    """

    number: int
    text: str
    verdict: Verdict
    evidence: list[str]


def judge_claims(results: StudyResults) -> list[Claim]:
    """Judges the paper's seven claims.

    Args:
        results: A finished study, as :func:`pathsgd.paper.reproduce` returns it.

    Returns:
        All seven in the order of the paper, each with its verdict and its numbers.
    """
    return [
        _same_curves(results), _unbalanced_hurts(results), _faster(results), _generalises(results),
        _with_dropout(results), _figure_1(results), _step_cost(results),
    ]  # fmt: skip


class Evidence:
    """Collects the measurements for and against a claim."""

    def __init__(self) -> None:
        self.holds: list[bool] = []
        self.lines: list[str] = []

    def add(self, text: str, holds: bool, counts: bool = True) -> None:
        if counts:
            self.holds.append(holds)
        self.lines.append((NOT_COUNTED if not counts else "" if holds else AGAINST) + text)

    def judge(self, number: int, text: str, missing: Sequence[str] = ()) -> Claim:
        """A claim of which a part was not run can fail, but not hold."""
        verdict: Verdict = "held" if self.holds and not missing else "not tested"
        if not all(self.holds):
            verdict = "not held"
        not_run = [f"not run: {', '.join(missing)}"] if missing else []
        return Claim(number, text, verdict, self.lines + not_run)


def _not_run(results: StudyResults, methods: Sequence[str], inits: Sequence[str]) -> list[str]:
    study = results.study
    return [METHODS[name].label for name in methods if name not in study.methods] + [
        f"the {init} start" for init in inits if init not in study.inits
    ]


def _find_both_starts(
    results: StudyResults, dataset: str, dropout: float, method: str
) -> tuple[list[RunRecord], list[RunRecord]] | None:
    balanced = results.finals.get(Cell(dataset, dropout, "balanced", method))
    unbalanced = results.finals.get(Cell(dataset, dropout, "unbalanced", method))
    return None if balanced is None or unbalanced is None else (balanced, unbalanced)


def _where(dataset: str, dropout: float = 0.0) -> str:
    return short_name(dataset) + (f", dropout {dropout:g}" if dropout else "")


def _same_curves(results: StudyResults) -> Claim:
    evidence = Evidence()
    for cell, own in results.finals.items():
        if cell.init != "balanced" or not METHODS[cell.method].invariant:
            continue
        other = results.finals.get(Cell(cell.dataset, cell.dropout, "unbalanced", cell.method))
        text = f"{_where(cell.dataset, cell.dropout)}, {METHODS[cell.method].label}: "
        agree = []
        if cell in results.exact:
            agree.append(results.exact[cell].lines == own[0].lines)
            text += f"scales that are powers of two: {'equal bit for bit' if agree[0] else 'NOT equal'}; "
        if other is not None:
            errors, losses = (measure_gaps(own, other, name) for name in ("test_error", "train_loss"))
            close = all(gap.mean <= min(CLOSE, CLOSE_PART * gap.level) for gap in errors)
            close = close and all(gap.mean <= CLOSE_PART * gap.level for gap in losses)
            agree.append(close and end_alike(own, other))
            ends = [summarize_last(records, "test_error").percent() for records in (own, other)]
            text += f"log-normal scales: test error {ends[0]} balanced, {ends[1]} unbalanced"
            if errors and losses:
                apart = max(gap.mean for gap in errors), max(gap.largest for gap in losses)
                text += (
                    f", in the mean over the epochs {100 * apart[0]:.2f} points apart; training losses apart "
                    f"by {apart[1]:.1e} at most"
                )
        evidence.add(text, all(agree), counts=cell.method == PATH)
    text = (
        "Path-SGD started balanced and unbalanced gives the same curves (in the mean over the epochs apart "
        f"by at most {100 * CLOSE:g} points and {CLOSE_PART:.0%} of the test error, and by {CLOSE_PART:.0%} "
        "of the training loss)."
    )
    return evidence.judge(1, text, _not_run(results, [PATH], BOTH_STARTS))


def _unbalanced_hurts(results: StudyResults) -> Claim:
    evidence = Evidence()
    for dataset in results.study.datasets:
        for dropout in results.study.dropouts:
            for method in RIVALS:
                both = _find_both_starts(results, dataset, dropout, method)
                if both is None:
                    continue
                errors = [summarize_last(records, "test_error") for records in both]
                losses = [summarize_last(records, "train_loss") for records in both]
                evidence.add(
                    f"{_where(dataset, dropout)}, {METHODS[method].label}: test error {errors[0].percent()} "
                    f"balanced, {errors[1].percent()} unbalanced; training loss {losses[0].plain()} and "
                    f"{losses[1].plain()}",
                    _is_worse(errors, HURT) or (_is_worse(errors, 1.0) and _is_worse(losses, HURT_LOSS)),
                    counts=not math.isnan(errors[0].mean),  # else there is nothing to hurt
                )
    text = "Unbalanced initialisation hurts SGD and AdaGrad considerably"
    text += f" ({HURT:g} times the test error; or a higher one, and {HURT_LOSS:g} times the training loss)."
    return evidence.judge(2, text, _not_run(results, RIVALS, BOTH_STARTS))


def _is_worse(pair: Sequence[MeanAndRange], times: float) -> bool:
    """Whether the second diverged, or is higher and at least this many times as high."""
    before, after = pair
    return math.isnan(after.mean) or (after.mean > before.mean and after.mean >= times * before.mean)


def _faster(results: StudyResults) -> Claim:
    evidence = Evidence()
    for name, compared in compare_with_rivals(results, 0.0).items():
        evidence.add(f"{_where(name)}: {compared.describe_epochs()}", compared.is_faster)
    text = "Balanced, without dropout: Path-SGD reaches a training loss in fewer epochs than SGD and AdaGrad."
    return evidence.judge(3, text, _not_compared(results, dropout=False))


def _generalises(results: StudyResults) -> Claim:
    evidence = Evidence()
    for name, compared in compare_with_rivals(results, 0.0).items():
        text, holds = f"{_where(name)}: {compared.describe_errors()}", compared.is_better
        if name == "cifar100":
            sgd, own, adagrad = (compared.errors[n].mean for n in ("sgd", PATH, "adagrad"))
            holds = sgd < own <= SLIGHTLY * sgd and not own >= adagrad
            text += "" if holds else "; in the paper SGD's is slightly lower here"
        evidence.add(text, holds)
    text = "Its final test error is lower, except on CIFAR-100, where SGD's is slightly lower."
    return evidence.judge(4, text, _not_compared(results, dropout=False))


def _with_dropout(results: StudyResults) -> Claim:
    evidence = Evidence()
    for dropout in filter(None, results.study.dropouts):
        for name, compared in compare_with_rivals(results, dropout).items():
            evidence.add(
                f"{_where(name, dropout)}: {compared.describe_epochs()}; {compared.describe_errors()}",
                compared.is_faster and compared.is_better,
                counts=name != "mnist",
            )
    text = "With dropout, except on MNIST, it converges faster and generalises better."
    return evidence.judge(5, text, _not_compared(results, dropout=True))


def _not_compared(results: StudyResults, dropout: bool) -> list[str]:
    missing = _not_run(results, (PATH, *RIVALS), ["balanced"])
    if any(results.study.dropouts) if dropout else 0.0 in results.study.dropouts:
        return missing
    return [*missing, "with dropout" if dropout else "without dropout"]


def _figure_1(results: StudyResults) -> Claim:
    evidence, ended_well = Evidence(), False
    for dataset in results.study.datasets:
        both = _find_both_starts(results, dataset, 0.0, "sgd")
        if both is not None:
            losses = [summarize_last(records, "train_loss") for records in both]
            ended = not math.isnan(losses[0].mean)
            ended_well = ended_well or ended
            evidence.add(
                f"(a) {_where(dataset)}: SGD ends at a training loss of {losses[0].plain()} balanced, "
                f"{losses[1].plain()} unbalanced",
                _is_worse(losses, 1.0),
                counts=ended,
            )
    chain, poor = explosion(), poor_updates()
    evidence.add(f"(b) {chain}", chain.exploded)
    evidence.add(
        f"(c) outputs of two equivalent networks after one step: apart by {poor.sgd_gap:.3g} with SGD, by "
        f"{round(poor.path_gap, 12):.1g} with Path-SGD",
        poor.sgd_gap > 1 and poor.path_gap < 1e-12,
    )
    missing = _not_run(results, ["sgd"], BOTH_STARTS)
    if not ended_well and not missing:
        missing.append("SGD without dropout, from a balanced start that ends well")
    text = (
        "Figure 1: SGD fails on unbalanced networks: (a) in training, (b) by explosion, (c) by poor updates."
    )
    return evidence.judge(6, text, missing)


def _step_cost(results: StudyResults) -> Claim:
    batch, cost = results.study.batch, results.cost
    most = ABOUT * (batch + 1) / batch
    evidence = Evidence()
    if cost is not None:
        evidence.add(
            f"{cost.net} on {cost.device}: a training step takes {cost.sgd_us:.0f} us with SGD (fused), "
            f"{cost.path_us:.0f} us with Path-SGD, {cost.ratio:.3f} times as long (up to {most:.3f} counts)",
            cost.ratio <= most,
        )
    text = f"A Path-SGD step costs about (B+1)/B of an SGD step: {(batch + 1) / batch:.3f} at batch {batch}."
    return evidence.judge(7, text)
