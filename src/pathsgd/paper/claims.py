"""The paper's seven claims, each held, not held or not tested, with its numbers.

What "considerably", "faster" and "about" mean is fixed here, for all data sets alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pathsgd.paper.cost import Cost
from pathsgd.paper.evidence import Race, Spread, finals, last, late, race
from pathsgd.paper.experiment.methods import METHODS, method
from pathsgd.paper.experiment.results import Results
from pathsgd.paper.experiment.study import Cell
from pathsgd.paper.figures.examples import explosion, poor_updates
from pathsgd.paper.summary import AGAINST, Claim, Verdict

PATH, RIVALS = "path-sgd", ("sgd", "adagrad")
CLOSE = 0.005
"""Test errors, means over the last third of the epochs, of runs that only rounding tells apart.

With large steps rounding is soon amplified to the size of a run's own wobble: on CIFAR-100 the errors after
the last epoch are 0.7 points apart, where two epochs of one run are 0.5 apart, and the means 0.2.
"""
HURT, HURT_LOSS = 1.25, 2.0
"""How many times the test error, or the training loss, of the balanced start is a considerable harm."""
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


def _verdict(holds: Sequence[bool], missing: Sequence[str] = ()) -> Verdict:
    """A claim of which a part was not run can fail, but not hold."""
    if not all(holds):
        return "not held"
    return "not tested" if missing or not holds else "held"


def _not_run(results: Results, names: Sequence[str], inits: Sequence[str] = ("balanced",)) -> list[str]:
    """What of this the study has not."""
    study = results.study
    return [METHODS[n].label for n in names if n not in study.methods] + [
        f"the {init} start" for init in inits if init not in study.inits
    ]


def _counted(text: str, holds: bool) -> str:
    """Evidence; what speaks against a claim is marked."""
    return text if holds else AGAINST + text


def _said(missing: Sequence[str]) -> list[str]:
    return [f"not run: {', '.join(missing)}"] if missing else []


def _where(dataset: str, dropout: float) -> str:
    return dataset.split("=")[0] + (f", dropout {dropout:g}" if dropout else "")


def _same_curves(results: Results) -> Claim:
    holds, evidence = [], []
    for cell, exact in results.exact.items():
        own = results.finals[cell]
        other = results.finals.get(Cell(cell.dataset, cell.dropout, "unbalanced", cell.method), [])
        same = exact.lines == own[0].lines
        agree = [same]
        text = f"{_where(cell.dataset, cell.dropout)}, {method(cell.method).label}: "
        text += f"scales that are powers of two: {'equal bit for bit' if same else 'NOT equal'}"
        if other:
            errors = late(own, "test_error"), late(other, "test_error")
            ends = last(own, "test_error"), last(other, "test_error")
            agree.append(abs(errors[0].mean - errors[1].mean) <= CLOSE)
            gap = max(
                abs(a - b)
                for x, y in zip(own, other, strict=True)
                for a, b in zip(x.curve("train_loss"), y.curve("train_loss"), strict=False)
            )
            text += (
                f"; log-normal scales: test error over the last third of the epochs {errors[0].percent()} "
                f"balanced, {errors[1].percent()} unbalanced (after the last {ends[0].percent()}, "
                f"{ends[1].percent()}), training losses apart by {gap:.1e} at most"
            )
        counts = cell.method == PATH  # others are told of, but the claim is about this one
        holds += agree * counts
        evidence.append(_counted(text, all(agree) or not counts))
    missing = _not_run(results, [PATH], ["balanced", "unbalanced"])
    text = "Path-SGD started balanced and unbalanced gives the same curves."
    return Claim(1, text, _verdict(holds, missing), evidence + _said(missing))


def _unbalance_hurts(results: Results) -> Claim:
    holds, evidence = [], []
    for dataset in results.study.datasets:
        for dropout in results.study.dropouts:
            for name in RIVALS:
                cells = [Cell(dataset, dropout, init, name) for init in ("balanced", "unbalanced")]
                if not all(cell in results.finals for cell in cells):
                    continue
                errors = [last(results.finals[cell], "test_error") for cell in cells]
                losses = [last(results.finals[cell], "train_loss") for cell in cells]
                hurt = _worse(errors, HURT) or _worse(losses, HURT_LOSS)
                counts = not math.isnan(errors[0].mean)  # else there is nothing to hurt
                holds += [hurt] * counts
                text = (
                    f"{_where(dataset, dropout)}, {method(name).label}: test error {errors[0].percent()} "
                    f"balanced, {errors[1].percent()} unbalanced; training loss {losses[0].plain()} and "
                    f"{losses[1].plain()}"
                )
                evidence.append(_counted(text, hurt or not counts))
    text = "Unbalanced initialisation hurts SGD and AdaGrad considerably"
    text += f" ({HURT:g} times the test error or {HURT_LOSS:g} times the training loss, or more)."
    missing = _not_run(results, RIVALS, ["balanced", "unbalanced"])
    return Claim(2, text, _verdict(holds, missing), evidence + _said(missing))


def _worse(pair: Sequence[Spread], times: float) -> bool:
    """Whether the second diverged, or is higher and at least so many times as high."""
    before, after = pair
    return math.isnan(after.mean) or (after.mean > before.mean and after.mean >= times * before.mean)


def _compared(results: Results, dropout: float) -> dict[str, tuple[Race | None, dict[str, Spread]]]:
    """For each data set with all three methods, balanced: who is faster, and the test errors."""
    found = {}
    for dataset in results.study.datasets:
        runs = finals(results, dataset, dropout, "balanced", (PATH, *RIVALS))
        if len(runs) == 3:
            errors = {name: last(own, "test_error") for name, own in runs.items()}
            found[dataset] = race(runs), errors
    return found


def _epochs(found: Race | None) -> str:
    if found is None:
        return "one of them diverged"
    each = ", ".join(f"{METHODS[name].label} {epochs}" for name, epochs in found.epochs.items())
    return f"epochs to a training loss of {found.target:.3g}, which all of them reach: {each}"


def _is_faster(found: Race | None) -> bool:
    return found is not None and all(found.epochs[PATH] < found.epochs[rival] for rival in RIVALS)


def _errors(errors: dict[str, Spread]) -> str:
    text = "test error " + ", ".join(f"{METHODS[n].label} {error.percent()}" for n, error in errors.items())
    own = errors[PATH]
    close = [
        METHODS[n].label for n in RIVALS if errors[n].least <= own.largest and own.least <= errors[n].largest
    ]
    if close and any(error.least < error.largest for error in errors.values()):
        text += f"; the seeds' ranges overlap with {' and '.join(close)}"
    return text


def _is_better(errors: dict[str, Spread]) -> bool:
    own = errors[PATH].mean
    return not math.isnan(own) and all(math.isnan(e) or own < e for e in (errors[r].mean for r in RIVALS))


def _faster(results: Results) -> Claim:
    found = _compared(results, 0.0)
    return Claim(
        3,
        "Balanced, without dropout: Path-SGD reaches a training loss in fewer epochs than SGD and AdaGrad.",
        _verdict([_is_faster(own) for own, _ in found.values()]),
        [
            _counted(f"{_where(name, 0.0)}: {_epochs(own)}", _is_faster(own))
            for name, (own, _) in found.items()
        ]
        + _said(_missing(results, dropout=False)),
    )


def _generalises(results: Results) -> Claim:
    holds, evidence = [], []
    for name, (_, errors) in _compared(results, 0.0).items():
        text = f"{_where(name, 0.0)}: {_errors(errors)}"
        if name == "cifar100":
            holds.append(errors["sgd"].mean < errors[PATH].mean)
            text += "" if holds[-1] else "; in the paper SGD's is the lower here"
        else:
            holds.append(_is_better(errors))
        evidence.append(_counted(text, holds[-1]))
    text = "Its final test error is lower, except on CIFAR-100, where SGD's is slightly lower."
    return Claim(4, text, _verdict(holds), evidence + _said(_missing(results, dropout=False)))


def _with_dropout(results: Results) -> Claim:
    holds, evidence = [], []
    for dropout in (d for d in results.study.dropouts if d):
        for name, (own, errors) in _compared(results, dropout).items():
            good = _is_faster(own) and _is_better(errors)
            counts = name != "mnist"
            holds += [good] * counts
            text = f"{_where(name, dropout)}: {_epochs(own)}; {_errors(errors)}"
            evidence.append(_counted(text, good or not counts))
    text = "With dropout, except on MNIST, it converges faster and generalises better."
    return Claim(5, text, _verdict(holds), evidence + _said(_missing(results, dropout=True)))


def _missing(results: Results, dropout: bool) -> list[str]:
    wanted = any(results.study.dropouts) if dropout else 0.0 in results.study.dropouts
    return _not_run(results, (PATH, *RIVALS)) + (
        [] if wanted else ["with dropout" if dropout else "without dropout"]
    )


def _figure_one(results: Results) -> Claim:
    holds, evidence = [], []
    for dataset in results.study.datasets:
        cells = [Cell(dataset, 0.0, init, "sgd") for init in ("balanced", "unbalanced")]
        if all(cell in results.finals for cell in cells):
            losses = [last(results.finals[cell], "train_loss") for cell in cells]
            worse, counts = _worse(losses, 1.0), not math.isnan(losses[0].mean)
            holds += [worse] * counts
            text = (
                f"(a) {_where(dataset, 0.0)}: SGD ends at a training loss of {losses[0].plain()} balanced, "
                f"{losses[1].plain()} unbalanced"
            )
            evidence.append(_counted(text, worse or not counts))
    burst, poor = explosion(), poor_updates()
    holds += [burst.exploded, poor.sgd_gap > 1 and poor.path_gap < 1e-12]
    text = (
        f"(c) outputs of two equivalent networks after one step: apart by {poor.sgd_gap:.3g} with SGD, by "
        f"{poor.path_gap:.1g} with Path-SGD"
    )
    evidence += [_counted(f"(b) {burst}", holds[-2]), _counted(text, holds[-1])]
    text = (
        "Figure 1: SGD fails on unbalanced networks: (a) in training, (b) by explosion, (c) by poor updates."
    )
    missing = _not_run(results, ["sgd"], ["balanced", "unbalanced"])
    missing += [] if 0.0 in results.study.dropouts else ["without dropout"]
    return Claim(6, text, _verdict(holds, missing), evidence + _said(missing))


def _costs(results: Results, cost: Cost | None) -> Claim:
    batch = results.study.batch
    most = ABOUT * (batch + 1) / batch
    text = f"A Path-SGD step costs about (B+1)/B of an SGD step: {(batch + 1) / batch:.3f} at batch {batch}."
    if cost is None:
        return Claim(7, text, "not tested", [])
    evidence = [
        f"{cost.net} on {cost.device}: a training step takes {cost.sgd_us:.0f} us with SGD (fused), "
        f"{cost.path_us:.0f} us with Path-SGD, {cost.ratio:.3f} times as long (up to {most:.3f} counts)"
    ]
    return Claim(7, text, _verdict([cost.ratio <= most]), evidence)
