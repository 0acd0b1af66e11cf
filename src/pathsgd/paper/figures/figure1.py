"""Figure 1: what an unbalanced start does to SGD, in training and in two examples."""

from __future__ import annotations

import itertools
from typing import Any

from pathsgd.paper.config import Cell
from pathsgd.paper.figures.curves import curve_of, loss_range, settled
from pathsgd.paper.figures.learning_curves import CurveStyle, draw_curve, set_ranges
from pathsgd.paper.figures.network_diagram import draw_example
from pathsgd.paper.figures.one_step_examples import explosion, poor_updates
from pathsgd.paper.figures.style import LINES, clean_axes, drawable, format_size, title_of
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.records.study_results import StudyResults

STYLES = {
    "balanced": CurveStyle("#e0523a", "o", LINES["balanced"], 1.8, filled=True, band=True),
    "unbalanced": CurveStyle("#0b3c7d", "s", LINES["unbalanced"], 1.8, filled=False, band=True),
}
"""The paper's colours: balanced red, unbalanced blue."""


def draw_figure1(results: StudyResults) -> Any:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(11, 7.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    left, right = top.subfigures(1, 2, width_ratios=(1, 1.6))
    a, b, c = left.subplots(), right.subplots(), bottom.subplots()
    _draw_training(a, results)
    draw_example(b, explosion(), width=0.57)
    b.set_title("(b) Weight explosion: $x = 1$, $\\delta = -1$, step size 1", pad=10)
    draw_example(c, poor_updates(), width=0.64)
    c.set_title("(c) Poor updates: $x = (1, 1)$, $\\delta = (-1, {-}1)$, step size 1", pad=10)
    figure.suptitle("Figure 1. What an unbalanced start does to SGD", fontsize=11)
    return figure


def find_pair(results: StudyResults) -> tuple[Cell, Cell] | None:
    """The balanced and the unbalanced cell of panel (a): SGD on MNIST without dropout, or what is nearest."""
    study = results.study
    methods = sorted((m for m in study.methods if not METHODS[m].invariant), key=lambda name: name != "sgd")
    datasets = sorted(study.datasets, key=lambda name: name != "mnist")
    for name, dropout, dataset in itertools.product(methods, sorted(study.dropouts), datasets):
        pair = Cell(dataset, dropout, "balanced", name), Cell(dataset, dropout, "unbalanced", name)
        if all(cell in results.finals for cell in pair) and results.finals[pair[0]]:
            return pair
    return None


def _draw_training(axes: Any, results: StudyResults) -> None:
    """Panel (a)."""
    pair = find_pair(results)
    if pair is None:
        axes.set_title("(a) Training with SGD, balanced and unbalanced")
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color="0.4")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    last = results.study.epochs
    curves = {cell: curve_of(results.finals[cell], "train_loss", last) for cell in pair}
    shown = loss_range([curves[pair[0]]])
    for k, (cell, curve) in enumerate(curves.items()):
        records = results.finals[cell]
        how = f"step size {format_size(records[0].run.step_size)}" if records else "no step size ended well"
        if shown.leaves(curve.values(settled(last))):
            how += f", beyond at {curve.last:.3g}"
        if curve.ends:
            how += f", {len(curve.ends)} of {len(records)} diverged"
        label = f"{cell.init}, {how}"
        draw_curve(axes, curve, STYLES[cell.init], shown, offset=0.5 * k, last=last, label=label)
    set_ranges(axes, shown, last)
    dropout = f", dropout {pair[0].dropout:g}" if pair[0].dropout else ""
    method, dataset = METHODS[pair[0].method].label, drawable(title_of(pair[0].dataset))
    axes.set_title(f"(a) {method} on {dataset}{dropout}")
    axes.set_xlabel("epoch")
    axes.set_ylabel("cross-entropy training loss")
    # Below the panel: the curves may be anywhere in it.
    axes.figure.legend(frameon=False, fontsize=8, handlelength=3.4, loc="outside lower center")
    clean_axes(axes)
