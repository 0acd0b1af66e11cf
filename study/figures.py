"""The paper's figures as PNG and SVG, with captions. Figure 1: what an unbalanced start does to SGD."""

import functools
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from pathsgd import PathSGD
from study import learning_curves as curves
from study.config import Cell
from study.files import write_atomically
from study.methods import METHODS
from study.runs import StudyResults

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SmallNet:
    """The weights of each layer, one row for each unit they lead to, and the outputs."""

    layers: tuple[Matrix, ...]
    outputs: tuple[float, ...]

    @property
    def weights(self) -> list[float]:
        return [weight for layer in self.layers for row in layer for weight in row]


@dataclass(frozen=True)
class OneStepExample:
    """A balanced network, an unbalanced one that computes the same function, and both after one step."""

    x: tuple[float, ...]
    balanced: tuple[SmallNet, SmallNet, SmallNet]  # before, after a step of SGD, after one of Path-SGD
    unbalanced: tuple[SmallNet, SmallNet, SmallNet]

    @property
    def gaps(self) -> list[float]:
        """Largest difference between the outputs of the two, before and after a step of each method."""
        pairs = zip(self.balanced, self.unbalanced, strict=True)
        return [max(abs(a - b) for a, b in zip(one.outputs, two.outputs, strict=True)) for one, two in pairs]

    @property
    def exploded(self) -> bool:
        """Whether SGD blew up a small weight of the unbalanced network and hardly moved a large one."""
        before, after, _ = (net.weights for net in self.unbalanced)
        changes = [abs(b / a) for a, b in zip(before, after, strict=True)]
        return max(changes) > 100 and min(changes) < 1.01

    def __str__(self) -> str:
        parts = []
        for name, nets in (("unbalanced", self.unbalanced), ("balanced", self.balanced)):
            before, sgd, path = (" and ".join(f"{w:.5g}" for w in net.weights) for net in nets)
            after = f"become {sgd} in one step of SGD, {path} in one of Path-SGD"
            parts.append(f"{name}, the weights {before} {after}")
        return "; ".join(parts)


@functools.cache  # asked for by the claim and by the figure
def explosion() -> OneStepExample:
    """Figure 1 (b): a chain of one unit, x = 1."""
    return _compute([[1.0]], [[1.0]], factors=[100.0], x=[1.0])


@functools.cache
def poor_updates() -> OneStepExample:
    """Figure 1 (c): two inputs, two hidden units, two outputs, x = (1, 1)."""
    return _compute([[1.0, 1.0], [1.0, 2.0]], [[1.0, 1.0], [2.0, 1.0]], factors=[10.0, 0.1], x=[1.0, 1.0])


def _compute(first: Any, second: Any, factors: list[float], x: list[float]) -> OneStepExample:
    w1, w2, c, inputs = (torch.tensor(v, dtype=torch.float64) for v in (first, second, factors, [x]))

    def step(w1: Tensor, w2: Tensor, method: str) -> SmallNet:
        layers = [nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype) for w in (w1, w2)]
        layers[0].weight.data, layers[1].weight.data = w1.clone(), w2.clone()
        model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        if method:
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            outputs = model(inputs)
            outputs.backward(-torch.ones_like(outputs))
            (sgd if method == "sgd" else PathSGD(model, lr=1.0)).step()
        weights = tuple(tuple(map(tuple, p.tolist())) for p in model.parameters())
        return SmallNet(weights, tuple(model(inputs)[0].tolist()))

    def take_steps(w1: Tensor, w2: Tensor) -> tuple[SmallNet, SmallNet, SmallNet]:
        return step(w1, w2, ""), step(w1, w2, "sgd"), step(w1, w2, "path")

    # Divided by the factor rather than multiplied by its inverse: 1 / 100 is then the nearest float to it.
    return OneStepExample(tuple(x), take_steps(w1, w2), take_steps(w1 * c[:, None], w2 / c))


STYLES = {
    "balanced": curves.CurveStyle("#e0523a", "o", curves.LINES["balanced"], 1.8, filled=True, band=True),
    "unbalanced": curves.CurveStyle("#0b3c7d", "s", curves.LINES["unbalanced"], 1.8, filled=False, band=True),
}
"""The paper's colours: balanced red, unbalanced blue."""
Point = tuple[float, float]
NET_HEIGHT = 0.8
STAGES = ("before", "after one SGD step", "after one Path-SGD step")


def draw_figure1(results: StudyResults) -> Any:
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
    """Balanced and unbalanced cell of panel (a): SGD on MNIST without dropout, or what is nearest."""
    study = results.study
    methods = sorted((m for m in study.methods if not METHODS[m].invariant), key=lambda name: name != "sgd")
    datasets = sorted(study.datasets, key=lambda name: name != "mnist")
    for name, dropout, dataset in itertools.product(methods, sorted(study.dropouts), datasets):
        pair = Cell(dataset, dropout, "balanced", name), Cell(dataset, dropout, "unbalanced", name)
        if all(cell in results.finals for cell in pair) and results.finals[pair[0]]:
            return pair
    return None


def _draw_training(axes: Any, results: StudyResults) -> None:
    pair = find_pair(results)
    if pair is None:
        axes.set_title("(a) Training with SGD, balanced and unbalanced: not run")
        return
    last = results.study.epochs
    drawn = {cell: curves.curve_of(results.finals[cell], "train_loss", last) for cell in pair}
    shown = curves.loss_range([drawn[pair[0]]])
    for k, (cell, curve) in enumerate(drawn.items()):
        records = results.finals[cell]
        how = (
            f"step size {curves.format_size(records[0].run.step_size)}"
            if records
            else "no step size ended well"
        )
        if shown.leaves(curve.values(curves.settled(last))):
            how += f", beyond at {curve.last:.3g}"
        if curve.ends:
            how += f", {len(curve.ends)} of {len(records)} diverged"
        label = f"{cell.init}, {how}"
        curves.draw_curve(axes, curve, STYLES[cell.init], shown, offset=0.5 * k, last=last, label=label)
    curves.set_ranges(axes, shown, last)
    dropout = f", dropout {pair[0].dropout:g}" if pair[0].dropout else ""
    axes.set_title(
        f"(a) {METHODS[pair[0].method].label} on {curves.drawable(curves.title_of(pair[0].dataset))}{dropout}"
    )
    axes.set_xlabel("epoch")
    axes.set_ylabel("cross-entropy training loss")
    # Below the panel: the curves may be anywhere in it.
    axes.figure.legend(frameon=False, fontsize=8, handlelength=3.4, loc="outside lower center")
    curves.clean_axes(axes)


def draw_example(axes: Any, example: OneStepExample, width: float) -> None:
    """Draws two rows, the balanced network and the unbalanced one; a column for each stage, one unit wide."""
    axes.set_axis_off()
    axes.set_xlim(0, 3)
    axes.set_ylim(0, 2.5)
    for column, (stage, gap) in enumerate(zip(STAGES, example.gaps, strict=True)):
        middle, differs = column + 0.5, gap > 1e-9
        verdict = f"outputs differ by {gap:.5g}" if differs else "same function"
        weight, style = ("bold", "normal") if differs else ("normal", "italic")
        axes.text(middle, 2.5, stage, ha="center", va="top", fontsize=9, fontweight="bold")
        axes.text(middle, 0, verdict, ha="center", va="bottom", fontsize=9, fontweight=weight, style=style)
        if column:
            axes.plot([column] * 2, [0, 2.45], color="0.85", linewidth=0.8)
    rows = ("balanced", example.balanced, 1.42), ("unbalanced", example.unbalanced, 0.3)
    for name, nets, bottom in rows:
        axes.text(0, bottom + 0.4, name, rotation=90, ha="left", va="center", fontsize=9)
        for column, net in enumerate(nets):
            corner = column + 0.13, bottom
            _draw_net(axes, net, example.x, corner, width, nets[0] if column else None)


def _draw_net(
    axes: Any, net: SmallNet, x: Sequence[float], corner: Point, width: float, before: SmallNet | None
) -> None:
    """Draws inputs on the left, outputs on the right; on a chain the changes of its weights, too."""
    sizes = [len(x), *(len(layer) for layer in net.layers)]

    def place(k: int, unit: int) -> Point:
        height = 1 - unit / (sizes[k] - 1) if sizes[k] > 1 else 0.5
        return corner[0] + k / (len(sizes) - 1) * width, corner[1] + height * NET_HEIGHT

    for k, layer in enumerate(net.layers):
        for unit, row in enumerate(layer):
            for source, weight in enumerate(row):
                ends = place(k, source), place(k + 1, unit)
                _draw_edge(axes, *ends, weight, level=source == unit)
                if before is not None and max(sizes) == 1:
                    middle = [(a + b) / 2 for a, b in zip(*ends, strict=True)]
                    axes.annotate(
                        f"{weight - before.layers[k][unit][source]:+.5g}", middle, (0, -5), ha="center",
                        va="top", textcoords="offset points", fontsize=8, color="0.35", style="italic",
                    )  # fmt: skip
    for k, count in enumerate(sizes):
        for unit in range(count):
            inner = "white" if k else "0.88"
            axes.plot(*place(k, unit), "o", markersize=15, color=inner, markeredgecolor="0.15", zorder=4)
            if k == 0:
                text = f"{x[unit]:.5g}"
                axes.text(*place(k, unit), text, ha="center", va="center_baseline", fontsize=8, zorder=5)
    for unit, output in enumerate(net.outputs):
        axes.annotate(
            f"{output:.5g}", place(len(sizes) - 1, unit), (11, 0), textcoords="offset points", va="center",
            fontsize=9, fontweight="bold",
        )  # fmt: skip


def _draw_edge(axes: Any, start: Point, end: Point, weight: float, level: bool) -> None:
    width = min(max(1 + 0.8 * math.log10(abs(weight) or 1e-9), 0.5), 3.0)
    arrow = {
        "arrowstyle": "-|>,head_width=0.16,head_length=0.32", "shrinkA": 8, "shrinkB": 8, "color": "0.45",
        "linewidth": width, "mutation_scale": 10,
    }  # fmt: skip
    axes.annotate("", end, start, arrowprops=arrow, zorder=2)
    # Crossing edges carry their weights before they cross, where it is clear whose they are.
    along = 0.5 if level else 0.29
    place = [a + along * (b - a) for a, b in zip(start, end, strict=True)]
    box = None if level else {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.annotate(
        f"{weight:.5g}", place, (0, 3 if level else 0), textcoords="offset points", ha="center",
        va="bottom" if level else "center", fontsize=8, bbox=box, zorder=3,
    )  # fmt: skip


DPI = 150
# A font that comes with matplotlib, and a salt for the names in an SVG file: the same figure, the same bytes.
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.linewidth": 0.7, "axes.titlesize": 10,
    "svg.fonttype": "path", "svg.hashsalt": "pathsgd", "path.simplify": True,
}  # fmt: skip


def draw_all(results: StudyResults, folder: Path) -> list[Path]:
    """Writes those of ``figure1`` to ``figure5`` that the study has runs for, and returns their paths."""
    epochs, written = results.study.epochs, []
    part = curves.first_part(epochs)
    with matplotlib.rc_context(RC):
        figures = {"figure1": draw_figure1(results) if results.study.compares_starts else None}
        for k, dropout, last in ((2, False, part), (3, True, part), (4, False, epochs), (5, True, epochs)):
            figures[f"figure{k}"] = curves.draw_learning(results, f"Figure {k}", dropout, last)
        for name, figure in figures.items():
            if figure is not None:
                written += [_write(figure, folder / f"{name}.{kind}") for kind in ("png", "svg")]
    return written


def _write(figure: Any, path: Path) -> Path:
    content = io.BytesIO()
    # Without a date: the same study, the same bytes.
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(content, format=path.suffix[1:], dpi=DPI, metadata=metadata)
    figure.set_layout_engine("none")  # where things go is settled, and finding it takes long
    write_atomically(path, content.getvalue())
    return path
