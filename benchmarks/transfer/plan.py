"""The jobs of each stage of the study: rates first, with one seed; then three seeds at the best of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .methods import AT_DEFAULT, LABELS, PLAIN, default_rate, label
from .networks import NETWORKS
from .records import Cell, Cells, best_rate, cells_of
from .train import Job, Record, parse_start

ROOT_TEN = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
GRIDS: dict[str, tuple[float, ...]] = {
    "sgd": ROOT_TEN[2:], "adamw": ROOT_TEN[:6], "muon": ROOT_TEN[3:8],
    "path-sgd": ROOT_TEN[2:], "path-adamw-plain": ROOT_TEN[:6],
}  # fmt: skip
FACTORS = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)
SEEDS = (0, 1, 2)
LONG = ("mlp-512x3", "vgg-48", "resnet-bn", "gpt-256")
EIGHT = (*LONG, "digits-rnn", "digits-vit", "resnet-plain", "mixer-128")


@dataclass(frozen=True)
class Setting:
    """The runs that a stage is planned for.

    Attributes:
        networks: their names.
        methods: only these, written as in a job, with options if they have any; all of the stage by default.
        starts: of the weights.
        epochs: of every run.
        cells: what has been recorded.
    """

    networks: Sequence[str] = tuple(NETWORKS)
    methods: Sequence[str] = ()
    starts: Sequence[str] = ("balanced",)
    epochs: int = 5
    cells: Cells | None = None

    def chosen(self, methods: Sequence[str]) -> Sequence[str]:
        return self.methods or methods

    def best(self, network: str, method: str, start: str) -> Cell | None:
        """The best rate at these epochs or at five, from this start or else from the balanced one."""
        cells = self.cells or {}
        for epochs in (self.epochs, 5):
            for place in (start, "balanced"):
                cell = best_rate(cells, network, label(method), place, epochs)
                if cell is not None:
                    return cell
        return None


def plan(stage: str, setting: Setting, records: Sequence[Record]) -> list[Job]:
    """The jobs of a stage, recorded ones included."""
    setting = Setting(setting.networks, setting.methods, setting.starts, setting.epochs, cells_of(records))
    return list(STAGES[stage](setting))


def plan_rates(setting: Setting) -> Iterator[Job]:
    """Plain optimizers over their grids; longer training takes the best rate of five epochs +- one."""
    for network in setting.networks:
        for start in setting.starts:
            for method in setting.chosen(tuple(PLAIN)):
                rates: Sequence[float] = GRIDS[method]
                known = setting.best(network, method, start)
                if setting.epochs > 5 and known is not None:
                    rates = _neighbours(known.rate)
                name = _with_adamw_rate(setting, network, method, start)
                yield from (Job(network, name, lr, start, 0, setting.epochs) for lr in rates)


def _neighbours(rate: float) -> Sequence[float]:
    k = min(range(len(ROOT_TEN)), key=lambda i: abs(ROOT_TEN[i] / rate - 1))
    return ROOT_TEN[max(0, k - 1) : k + 2]


def _with_adamw_rate(setting: Setting, network: str, method: str, start: str) -> str:
    """Muon takes for its AdamW the rate that is best for AdamW alone."""
    if method != "muon":
        return method
    best = setting.best(network, "adamw", start)
    return f"muon:adamw_lr={3e-3 if best is None else best.rate:g}"


def plan_around_default(setting: Setting) -> Iterator[Job]:
    """Methods that have one default rate at rates around it, for the curves over the rate."""
    for method in setting.chosen(AT_DEFAULT):
        default = default_rate(method)
        for network in setting.networks:
            for start in setting.starts:
                for factor in FACTORS:
                    lr = None if factor == 1 else float(f"{factor * default:.3g}")
                    yield Job(network, method, lr, start, 0, setting.epochs)


def plan_seeds(setting: Setting) -> Iterator[Job]:
    """Plain optimizers at their best rate, the others at their default, three times."""
    for network in setting.networks:
        for start in setting.starts:
            for method in setting.chosen((*PLAIN, *AT_DEFAULT)):
                if method.partition(":")[0] in AT_DEFAULT:
                    yield from (Job(network, method, None, start, seed, setting.epochs) for seed in SEEDS)
                    continue
                best = setting.best(network, method, start)
                if best is None:
                    print(f"left out: no rate of {LABELS[method]} worked on {network}", file=sys.stderr)
                    continue
                yield from (Job(network, best.method, best.lr, start, seed, setting.epochs) for seed in SEEDS)


def plan_rebalanced(setting: Setting) -> Iterator[Job]:
    """``balance`` once and then a plain optimizer."""
    methods = setting.chosen(tuple(PLAIN))
    again = Setting(
        setting.networks, methods, [f"{start}+balance" for start in ("balanced", "unbalanced")],
        setting.epochs, setting.cells,
    )  # fmt: skip
    yield from plan_seeds(again)


def plan_other_rates(setting: Setting) -> Iterator[Job]:
    """PathSGD and PathNormalized over a grid."""
    methods = setting.chosen(("path-sgd", "path-adamw-plain"))
    yield from plan_rates(Setting(setting.networks, methods, setting.starts, setting.epochs, setting.cells))


def plan_balance(setting: Setting) -> Iterator[Job]:
    """BalancedMuon at its default, from starts without ``balance``; AdamW and Muon from every start, at the
    best rate of the balanced one."""
    for network in setting.networks:
        for method in setting.chosen(("balanced-muon", "adamw", "muon")):
            starts, name, lr = setting.starts, method, None
            if method.partition(":")[0] in AT_DEFAULT:
                starts = [start for start in starts if parse_start(start)[1] is None]
            else:
                best = setting.best(network, method, "balanced")
                if best is None:
                    print(f"left out: no rate of {LABELS[method]} worked on {network}", file=sys.stderr)
                    continue
                name, lr = best.method, best.lr
            for start in starts:
                yield from (Job(network, name, lr, start, seed, setting.epochs) for seed in SEEDS)


STAGES = {
    "rates": plan_rates,
    "around-default": plan_around_default,
    "seeds": plan_seeds,
    "rebalanced": plan_rebalanced,
    "other-rates": plan_other_rates,
    "balance": plan_balance,
}
AFRESH = ("balance",)
"""Stages compared among themselves, so what was recorded before is run again; of EIGHT by default."""
