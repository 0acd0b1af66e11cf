"""Figure 1: what an unbalanced start does to SGD, in training and in two examples."""

from __future__ import annotations

from typing import Any

from pathsgd.paper.config import Cell
from pathsgd.paper.figures.curves import curve_of, loss_range, settled
from pathsgd.paper.figures.learning_curves import Look, draw_curve
from pathsgd.paper.figures.network_diagram import draw_example
from pathsgd.paper.figures.one_step_examples import explosion, poor_updates
from pathsgd.paper.figures.style import LINES, clean_axes, drawable, format_size, title_of
from pathsgd.paper.optimizers import find_method
from pathsgd.paper.records.study_results import StudyResults

LOOKS = {
    "balanced": Look("#e0523a", "o", LINES["balanced"], 1.8, filled=True, band=True),
    "unbalanced": Look("#0b3c7d", "s", LINES["unbalanced"], 1.8, filled=False, band=True),
}
"""The paper's colours: balanced red, unbalanced blue."""


def draw_figure1(results: StudyResults) -> Any:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(11, 7.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    left, right = top.subfigures(1, 2, width_ratios=(1, 1.6))
    a, b, c = left.subplots(), right.subplots(), bottom.subplots()
    training(a, results)
    draw_example(b, explosion(), width=0.57)
    b.set_title("(b) Weight explosion: $x = 1$, $\\delta = -1$, step size 1", pad=10)
    draw_example(c, poor_updates(), width=0.64)
    c.set_title("(c) Poor updates: $x = (1, 1)$, $\\delta = (-1, {-}1)$, step size 1", pad=10)
    figure.suptitle("Figure 1. What an unbalanced start does to SGD", fontsize=11)
    return figure


def compared(results: StudyResults) -> tuple[Cell, Cell] | None:
    """The balanced and the unbalanced cell of panel (a): of SGD on MNIST without dropout, or what comes next
    to it. None if no data set has both."""
    study = results.study
    methods = [m for m in ("sgd", *study.methods) if m in study.methods and not find_method(m).invariant]
    datasets = sorted(study.datasets, key=lambda name: name != "mnist")
    for name in dict.fromkeys(methods):
        for dropout in sorted(study.dropouts):
            for dataset in datasets:
                pair = Cell(dataset, dropout, "balanced", name), Cell(dataset, dropout, "unbalanced", name)
                if all(cell in results.finals for cell in pair) and results.finals[pair[0]]:
                    return pair
    return None


def training(axes: Any, results: StudyResults) -> None:
    """Panel (a)."""
    pair = compared(results)
    if pair is None:
        axes.set_title("(a) Training with SGD, balanced and unbalanced")
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color="0.4")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    last = results.study.epochs
    curves = {cell: curve_of(results.finals[cell], "train_loss", last) for cell in pair}
    shown = loss_range([curves[pair[0]]])
    for cell, curve in curves.items():
        runs = results.finals[cell]
        how = f"step size {format_size(runs[0].run.step_size)}" if runs else "no step size ended well"
        if shown.leaves(curve.values(settled(last))):
            how += f", beyond at {curve.last:.3g}"
        if curve.ends:
            how += f", {len(curve.ends)} of {len(runs)} diverged"
        label = f"{cell.init}, {how}"
        draw_curve(
            axes, curve, LOOKS[cell.init], shown, offset=0.5 * (cell is pair[1]), last=last, label=label
        )
    if shown.log:
        axes.set_yscale("log")
    axes.set_ylim(shown.low, shown.high)
    axes.set_xlim(-0.01 * last, last * 1.01)
    axes.xaxis.get_major_locator().set_params(integer=True)
    dropout = f", dropout {pair[0].dropout:g}" if pair[0].dropout else ""
    axes.set_title(
        f"(a) {find_method(pair[0].method).label} on {drawable(title_of(pair[0].dataset))}{dropout}"
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("cross-entropy training loss")
    # Below the panel: the curves may be anywhere in it.
    axes.figure.legend(frameon=False, fontsize=8, handlelength=3.4, loc="outside lower center")
    clean_axes(axes)
