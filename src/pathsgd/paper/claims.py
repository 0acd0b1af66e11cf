"""The paper's seven claims, each held, not held or not tested, with its numbers.

What "considerably", "faster" and "about" mean is fixed here, for all data sets alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pathsgd.paper.comparison import PATH, RIVALS, compared_on
from pathsgd.paper.config import Cell
from pathsgd.paper.cost import Cost
from pathsgd.paper.data.dataset import short_name
from pathsgd.paper.evidence import Spread, alike, gaps, last
from pathsgd.paper.experiment.results import Results
from pathsgd.paper.figures.examples import explosion, poor_updates
from pathsgd.paper.optimizers import METHODS, find_method
from pathsgd.paper.summary import AGAINST, NOT_COUNTED, Claim, Verdict

CLOSE, CLOSE_PART = 0.005, 0.1
"""How far apart curves that only rounding tells apart may be, in the mean over the epochs: test errors, and
test errors and training losses in parts of their own mean.

Not after the last epoch: with large steps rounding is soon amplified to the size of a run's own wobble. On
CIFAR-100 the errors after the last epoch are 0.7 points apart, where two epochs of one run are 0.5 apart.
"""
HURT, HURT_LOSS = 1.25, 2.0
"""How many times the test error, or the training loss, of the balanced start is a considerable harm."""
SLIGHTLY = 1.05
"""How many times an error that is slightly lower the other may be."""
ABOUT = 1.04
"""How many times (B+1)/B still is about that."""


def claims(results: Results, cost: Cost | None) -> list[Claim]:
    return [
        _same_curves(results),
        _unbalance_hurts(results),
        _faster(results),
        _generalises(results),
        _with_dropout(results),
        _figure_one(results),
        _costs(results, cost),
    ]


class Weighed:
    """Evidence for and against a claim."""

    def __init__(self) -> None:
        self.holds: list[bool] = []
        self.evidence: list[str] = []

    def add(self, text: str, holds: bool, counts: bool = True) -> None:
        if counts:
            self.holds.append(holds)
        mark = NOT_COUNTED if not counts else "" if holds else AGAINST
        self.evidence.append(mark + text)

    def claim(self, number: int, text: str, missing: Sequence[str] = ()) -> Claim:
        """A claim of which a part was not run can fail, but not hold."""
        verdict: Verdict = "held" if self.holds and not missing else "not tested"
        if not all(self.holds):
            verdict = "not held"
        said = [f"not run: {', '.join(missing)}"] if missing else []
        return Claim(number, text, verdict, self.evidence + said)


def _not_run(results: Results, names: Sequence[str], inits: Sequence[str] = ("balanced",)) -> list[str]:
    """What of this the study has not."""
    study = results.study
    return [METHODS[n].label for n in names if n not in study.methods] + [
        f"the {init} start" for init in inits if init not in study.inits
    ]


def _where(dataset: str, dropout: float) -> str:
    return short_name(dataset) + (f", dropout {dropout:g}" if dropout else "")


def _same_curves(results: Results) -> Claim:
    weighed = Weighed()
    for cell, own in results.finals.items():
        if cell.init != "balanced" or not find_method(cell.method).invariant:
            continue
        other = results.finals.get(Cell(cell.dataset, cell.dropout, "unbalanced", cell.method))
        text = f"{_where(cell.dataset, cell.dropout)}, {find_method(cell.method).label}: "
        agree = []
        if cell in results.exact:
            agree.append(results.exact[cell].lines == own[0].lines)
            text += f"scales that are powers of two: {'equal bit for bit' if agree[0] else 'NOT equal'}; "
        if other is not None:
            errors, losses = (gaps(own, other, name) for name in ("test_error", "train_loss"))
            close = all(e.mean <= min(CLOSE, CLOSE_PART * e.level) for e in errors)
            close = close and all(loss.mean <= CLOSE_PART * loss.level for loss in losses)
            agree.append(close and alike(own, other))
            ends = last(own, "test_error"), last(other, "test_error")
            text += (
                f"log-normal scales: test error {ends[0].percent()} balanced, {ends[1].percent()} unbalanced"
            )
            if errors and losses:
                apart = max(e.mean for e in errors), max(loss.largest for loss in losses)
                text += (
                    f", in the mean over the epochs {100 * apart[0]:.2f} points apart; training losses apart "
                    f"by {apart[1]:.1e} at most"
                )
        weighed.add(text, all(agree), counts=cell.method == PATH)
    text = (
        "Path-SGD started balanced and unbalanced gives the same curves (in the mean over the epochs apart "
        f"by at most {100 * CLOSE:g} points and {CLOSE_PART:.0%} of the test error, and by {CLOSE_PART:.0%} "
        "of the training loss)."
    )
    return weighed.claim(1, text, _not_run(results, [PATH], ["balanced", "unbalanced"]))


def _unbalance_hurts(results: Results) -> Claim:
    weighed = Weighed()
    for dataset in results.study.datasets:
        for dropout in results.study.dropouts:
            for name in RIVALS:
                cells = [Cell(dataset, dropout, init, name) for init in ("balanced", "unbalanced")]
                if not all(cell in results.finals for cell in cells):
                    continue
                errors = [last(results.finals[cell], "test_error") for cell in cells]
                losses = [last(results.finals[cell], "train_loss") for cell in cells]
                weighed.add(
                    f"{_where(dataset, dropout)}, {METHODS[name].label}: test error {errors[0].percent()} "
                    f"balanced, {errors[1].percent()} unbalanced; training loss {losses[0].plain()} and "
                    f"{losses[1].plain()}",
                    _worse(errors, HURT) or (_worse(errors, 1.0) and _worse(losses, HURT_LOSS)),
                    counts=not math.isnan(errors[0].mean),  # else there is nothing to hurt
                )
    text = "Unbalanced initialisation hurts SGD and AdaGrad considerably"
    text += f" ({HURT:g} times the test error; or a higher one, and {HURT_LOSS:g} times the training loss)."
    return weighed.claim(2, text, _not_run(results, RIVALS, ["balanced", "unbalanced"]))


def _worse(pair: Sequence[Spread], times: float) -> bool:
    """Whether the second diverged, or is higher and at least so many times as high."""
    before, after = pair
    return math.isnan(after.mean) or (after.mean > before.mean and after.mean >= times * before.mean)


def _faster(results: Results) -> Claim:
    weighed = Weighed()
    for name, compared in compared_on(results, 0.0).items():
        weighed.add(f"{_where(name, 0.0)}: {compared.said_of_epochs()}", compared.faster)
    text = "Balanced, without dropout: Path-SGD reaches a training loss in fewer epochs than SGD and AdaGrad."
    return weighed.claim(3, text, _missing(results, dropout=False))


def _generalises(results: Results) -> Claim:
    weighed = Weighed()
    for name, compared in compared_on(results, 0.0).items():
        text = f"{_where(name, 0.0)}: {compared.said_of_errors()}"
        if name == "cifar100":
            sgd, own, adagrad = (compared.errors[n].mean for n in ("sgd", PATH, "adagrad"))
            expected = sgd < own <= SLIGHTLY * sgd and not own >= adagrad
            weighed.add(text + ("" if expected else "; in the paper SGD's is slightly lower here"), expected)
        else:
            weighed.add(text, compared.better)
    text = "Its final test error is lower, except on CIFAR-100, where SGD's is slightly lower."
    return weighed.claim(4, text, _missing(results, dropout=False))


def _with_dropout(results: Results) -> Claim:
    weighed = Weighed()
    for dropout in (d for d in results.study.dropouts if d):
        for name, compared in compared_on(results, dropout).items():
            weighed.add(
                f"{_where(name, dropout)}: {compared.said_of_epochs()}; {compared.said_of_errors()}",
                compared.faster and compared.better,
                counts=name != "mnist",
            )
    text = "With dropout, except on MNIST, it converges faster and generalises better."
    return weighed.claim(5, text, _missing(results, dropout=True))


def _missing(results: Results, dropout: bool) -> list[str]:
    wanted = any(results.study.dropouts) if dropout else 0.0 in results.study.dropouts
    return _not_run(results, (PATH, *RIVALS)) + (
        [] if wanted else ["with dropout" if dropout else "without dropout"]
    )


def _figure_one(results: Results) -> Claim:
    weighed, trained = Weighed(), False
    for dataset in results.study.datasets:
        cells = [Cell(dataset, 0.0, init, "sgd") for init in ("balanced", "unbalanced")]
        if all(cell in results.finals for cell in cells):
            losses = [last(results.finals[cell], "train_loss") for cell in cells]
            trained = trained or not math.isnan(losses[0].mean)
            weighed.add(
                f"(a) {_where(dataset, 0.0)}: SGD ends at a training loss of {losses[0].plain()} balanced, "
                f"{losses[1].plain()} unbalanced",
                _worse(losses, 1.0),
                counts=not math.isnan(losses[0].mean),
            )
    burst, poor = explosion(), poor_updates()
    weighed.add(f"(b) {burst}", burst.exploded)
    weighed.add(
        f"(c) outputs of two equivalent networks after one step: apart by {poor.sgd_gap:.3g} with SGD, by "
        f"{poor.path_gap:.1g} with Path-SGD",
        poor.sgd_gap > 1 and poor.path_gap < 1e-12,
    )
    text = (
        "Figure 1: SGD fails on unbalanced networks: (a) in training, (b) by explosion, (c) by poor updates."
    )
    missing = _not_run(results, ["sgd"], ["balanced", "unbalanced"])
    if not trained and not missing:
        missing.append("SGD without dropout, from a balanced start that ends well")
    return weighed.claim(6, text, missing)


def _costs(results: Results, cost: Cost | None) -> Claim:
    batch = results.study.batch
    most = ABOUT * (batch + 1) / batch
    text = f"A Path-SGD step costs about (B+1)/B of an SGD step: {(batch + 1) / batch:.3f} at batch {batch}."
    weighed = Weighed()
    if cost is not None:
        weighed.add(
            f"{cost.net} on {cost.device}: a training step takes {cost.sgd_us:.0f} us with SGD (fused), "
            f"{cost.path_us:.0f} us with Path-SGD, {cost.ratio:.3f} times as long (up to {most:.3f} counts)",
            cost.ratio <= most,
        )
    return weighed.claim(7, text)
