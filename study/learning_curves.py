"""Learning curves, Figures 2 to 5: a row for each data set, columns for training loss and both errors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from study.config import Cell
from study.data import short_name
from study.methods import METHODS
from study.runs import RunRecord, StudyResults
from study.sources import SOURCES


@dataclass(frozen=True)
class Curve:
    """Repeats of one cell, one number per epoch."""

    mean: list[float]  # up to the last epoch of the shortest repeat: over fewer it would jump there
    low: list[float]
    high: list[float]
    rest: list[
        tuple[int, list[float]]
    ]  # for each longer repeat the epoch it goes on alone from, and its values
    ends: list[tuple[int, float]]  # where repeats diverged

    @property
    def last(self) -> float:
        """Last value: the mean of all repeats that got there."""
        tails = [values[-1] for _, values in self.rest]
        return sum(tails) / len(tails) if tails else self.mean[-1] if self.mean else math.nan

    @property
    def tails(self) -> list[float]:
        return [v for _, values in self.rest for v in values[1:]]

    def values(self, first: int) -> list[float]:
        """Everything drawn as a line, from an epoch on; where it ends if it ends before."""
        tails = [v for start, values in self.rest for v in values[max(first - start, 0) :]]
        return self.mean[first:] + tails or self.mean[-1:]


def curve_of(runs: Sequence[RunRecord], name: str, last: int) -> Curve:
    """Curve of one of the recorded numbers over the epochs 0 to ``last``."""
    series = [_usable(run, name)[: last + 1] for run in runs]
    common = min(map(len, series), default=0)
    together = [[values[k] for values in series] for k in range(common)]
    alone = max(common - 1, 0)  # one epoch earlier, so that the line goes on from where they were together
    return Curve(
        mean=[sum(values) / len(values) for values in together],
        low=[min(values) for values in together],
        high=[max(values) for values in together],
        rest=[(alone, values[alone:]) for values in series if len(values) > common],
        ends=[
            (len(values) - 1, values[-1])
            for run, values in zip(runs, series, strict=True)
            if run.status == "diverged" and values and len(values) <= last
        ],
    )


def _usable(run: RunRecord, name: str) -> list[float]:
    """Values up to the epoch in which a run diverged, whose errors are those of a network of nans."""
    values = run.curve(name)
    return list(takewhile(math.isfinite, values[:-1] if run.status == "diverged" else values))


@dataclass(frozen=True)
class AxisRange:
    low: float
    high: float
    log: bool = False

    def leaves(self, values: Sequence[float]) -> str:
        """An arrow if a curve is out of range: up if all of it is too high; down if it ends below."""
        edge = self.high if self.log else self.low + 0.97 * (self.high - self.low)
        if values and all(value > edge for value in values):
            return "\u2191"
        return "\u2193" if values and values[-1] < self.low else ""


def settled(last: int) -> int:
    """The first epoch that counts for a range: the first errors are so high that they would fill it."""
    return min(max(2, round(0.06 * last)), last)


def loss_range(reference: Sequence[Curve]) -> AxisRange:
    """Range from the least loss to a little more than the first; logarithmic where that is far."""
    values = [v for curve in reference for v in curve.low + curve.tails if v > 0]
    if not values:
        return AxisRange(0.0, 1.0)
    low = min(values)
    high = max([curve.high[0] for curve in reference if curve.high] + [low])
    if high > 10 * low:
        return AxisRange(low / 1.5, high * 1.6, log=True)
    span = (high - low) or high
    return AxisRange(max(low - 0.06 * span, 0.0), high + 0.06 * span)


def error_range(reference: Sequence[Curve], others: Sequence[Curve], last: int) -> AxisRange:
    """Range of the errors of the reference curves once settled; others may double it, and no more."""
    first = settled(last)
    values = [v for c in reference for v in (c.low[first:] + c.high[first:] + c.tails or c.mean[-1:])]
    if not values:
        return AxisRange(0.0, 1.0)
    low, high = min(values), max(values)
    span = max(high - low, 0.005)
    most = max([v for c in others if (v := c.last) <= low + 2 * span] + [high])
    top = max(most, low + span)
    bottom = low - 0.07 * (top - low)
    # Room below zero, so that a curve on the axis is seen; no more than that.
    return AxisRange(max(bottom, -0.03 * top), top + 0.07 * (top - low))


def first_part(epochs: int) -> int:
    """About a third of the epochs, as a round number: what the paper's Figures 2 and 3 show."""
    round_numbers = [5] + [b * 10**k for k in range(5) for b in (10, 15, 20, 25, 30, 40, 50, 60, 80)]
    return min(epochs, min(round_numbers, key=lambda n: (abs(n - epochs / 3), -n)))


METHOD_STYLES = {
    "sgd": ("#2f74c0", "s"), "adagrad": ("#efa92b", "^"), "path-sgd": ("#6b0f1a", "o"),
    "momentum": ("#62b5e5", "D"), "adam": ("#2a9d6f", "v"), "adamw": ("#8fcfa8", "<"),
    "path-momentum": ("#c2452d", "X"), "path-adagrad": ("#8a5a16", "p"), "path-adam": ("#0b4a2c", "h"),
    "path-adamw": ("#3b1054", "d"),
}  # fmt: skip
"""Colour and marker. The paper's three differ in lightness too: dark, middle, light."""
LINES = {"balanced": "-", "unbalanced": (0, (4, 1.6)), "powers-of-two": ":"}
COLUMNS = {
    "train_loss": "Cross-Entropy Training Loss", "train_error": "0/1 Training Error",
    "test_error": "0/1 Test Error",
}  # fmt: skip
MARKS_PER_CURVE = 8
MOST_NOTES = 3  # curves out of range that are named above a panel; more are counted
CROSS: dict[str, Any] = {"marker": "x", "markersize": 8, "markeredgewidth": 2}
Finals = Mapping[Cell, list[RunRecord]]


@dataclass(frozen=True)
class CurveStyle:
    colour: str
    marker: str
    line: Any
    width: float
    filled: bool
    band: bool

    def options(self) -> dict[str, Any]:
        return {
            "color": self.colour, "marker": self.marker, "linestyle": self.line, "linewidth": self.width,
            "markersize": 4.5 if self.filled else 5.5, "markeredgecolor": self.colour, "markeredgewidth": 1.0,
            "markerfacecolor": self.colour if self.filled else "white",
        }  # fmt: skip


def draw_learning(results: StudyResults, name: str, dropout: bool, last: int) -> Any | None:
    """Draws the runs with dropout, or those without; None if there are none."""
    study = results.study
    dropouts = [d for d in study.dropouts if (d > 0) == dropout]
    rows = [(dataset, d) for dataset in study.datasets for d in dropouts]
    if not rows:
        return None
    figure = Figure(figsize=(11, 2.35 * len(rows) + 1.25), layout="constrained")
    panels = figure.subplots(len(rows), 3, squeeze=False)
    notes = []
    for row, (dataset, d) in zip(panels, rows, strict=True):
        cells = {c: runs for c, runs in results.finals.items() if (c.dataset, c.dropout) == (dataset, d)}
        columns = zip(row, COLUMNS, strict=True)
        notes.append([_draw_panel(axes, cells, column, last, faint=dropout) for axes, column in columns])
        label = drawable(title_of(dataset)) + (f"\ndropout {d:g}" if len(dropouts) > 1 else "")
        row[0].set_ylabel(label, fontsize=11 if len(label) < 16 else 8, fontweight="bold")
    for axes, title in zip(panels[0], COLUMNS.values(), strict=True):
        axes.set_title(title, pad=6 + 10 * max(notes[0]))
    for axes in panels[-1]:
        axes.set_xlabel("epoch")
    _draw_legend(figure, results, rows, last, faint=dropout)
    epochs = f"first {last} of {study.epochs} epochs" if last < study.epochs else f"{last} epochs"
    repeats = f"; mean of {results.seeds} runs, band: all of them" if results.seeds != "1" else ""
    how = "with" if dropout else "without"
    figure.suptitle(f"{name}. Learning curves {how} dropout, {epochs}{repeats}", fontsize=11)
    return figure


def style_of(cell: Cell, finals: Finals, faint: bool) -> CurveStyle:
    """Style of a cell; if ``faint``, unbalanced starts are in the background.

    A rescaled start of an invariant method is drawn as marks: the balanced line would hide its own.
    """
    colour, marker = METHOD_STYLES[cell.method]
    balanced, invariant = cell.init == "balanced", METHODS[cell.method].invariant
    if not balanced and invariant and finals.get(Cell(cell.dataset, cell.dropout, "balanced", cell.method)):
        return CurveStyle(colour, marker, "none", 0.0, filled=False, band=False)
    width = 0.9 if faint and not balanced else 1.9 if invariant else 1.5
    return CurveStyle(colour, marker, LINES[cell.init], width, filled=balanced, band=balanced or not faint)


def _draw_panel(axes: Any, cells: Finals, column: str, last: int, faint: bool) -> int:
    """Draws one panel; returns the number of lines above it."""
    curves = {cell: curve_of(runs, column, last) for cell, runs in cells.items() if runs}
    curves = {cell: curve for cell, curve in curves.items() if curve.mean}
    shown = _choose_range(curves, cells, column, last)
    missing = [cell for cell, runs in cells.items() if not runs and column == "train_loss"]
    beyond: list[str] = []
    for k, (cell, curve) in enumerate(curves.items()):
        draw_curve(axes, curve, style_of(cell, cells, faint), shown, offset=k / len(curves), last=last)
        arrow = shown.leaves(curve.values(settled(last)))
        if arrow:
            end = f"{curve.last:.3g}" if column == "train_loss" else format_percent(curve.last)
            beyond.append(f"{_label(cell)}: {end} {arrow}")
    set_ranges(axes, shown, last)
    if column != "train_loss":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        # As many digits as the ticks need: a rounded percentage would be at the wrong place.
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))
    clean_axes(axes)
    notes = _limit([f"{_label(cell)}: no step size ended well" for cell in missing], "without a step size")
    notes += _limit(beyond, "curves beyond")
    # Above the panel: inside, curves would run through it.
    axes.annotate(
        "\n".join(notes), (1, 1), (0, 2), "axes fraction", "offset points", ha="right", va="bottom",
        fontsize=7, color="0.25", linespacing=1.35,
    )  # fmt: skip
    return len(notes)


def _limit(notes: list[str], many: str) -> list[str]:
    return notes if len(notes) <= MOST_NOTES else [f"{len(notes)} {many}"]


def _label(cell: Cell) -> str:
    return f"{METHODS[cell.method].label}, {cell.init}"


def _choose_range(curves: Mapping[Cell, Curve], cells: Finals, column: str, last: int) -> AxisRange:
    """Range of the balanced runs that ended well, so that one that went wrong does not flatten the others."""
    done = [cell for cell in curves if all(run.status == "done" for run in cells[cell])]
    well = [curves[cell] for cell in done if cell.init == "balanced"] or list(curves.values())
    others = [curve for curve in curves.values() if curve not in well]
    return loss_range(well) if column == "train_loss" else error_range(well, others, last)


def set_ranges(axes: Any, shown: AxisRange, last: int) -> None:
    if shown.log:
        axes.set_yscale("log")
    axes.set_xlim(-0.01 * last, last * 1.01)
    axes.set_ylim(shown.low, shown.high)
    axes.xaxis.get_major_locator().set_params(integer=True)


def draw_curve(
    axes: Any, curve: Curve, style: CurveStyle, shown: AxisRange, offset: float, last: int, label: str = ""
) -> None:
    epochs = range(len(curve.mean))
    every = max(1, math.ceil((last + 1) / MARKS_PER_CURVE))
    # Each curve has its marks elsewhere, so that they do not cover each other; marks alone are above lines.
    marks, order = (int(offset * every), every), 4 if style.line == "none" else 3
    axes.plot(epochs, curve.mean, markevery=marks, zorder=order, label=label, **style.options())
    if style.band and any(low < high for low, high in zip(curve.low, curve.high, strict=True)):
        band = curve.low, curve.high
        axes.fill_between(epochs, *band, color=style.colour, alpha=0.16, linewidth=0, zorder=2)
    for first, values in curve.rest:
        places = range(first, first + len(values))
        axes.plot(places, values, color=style.colour, linestyle=style.line, linewidth=0.8, zorder=3)
    for epoch, value in curve.ends:
        inside = min(max(value, shown.low), shown.high)
        axes.plot([epoch], [inside], color=style.colour, clip_on=False, zorder=7, **CROSS)


def _draw_legend(figure: Any, results: StudyResults, rows: Sequence[object], last: int, faint: bool) -> None:
    handles: dict[str, Line2D] = {}
    cells = [cell for cell, runs in results.finals.items() if runs and (cell.dataset, cell.dropout) in rows]
    # By method: a column of the legend for each.
    for cell in sorted(cells, key=lambda cell: results.study.methods.index(cell.method)):
        options = style_of(cell, results.finals, faint).options()
        handles.setdefault(_label(cell), Line2D([], [], label=_label(cell), **options))
    if any(curve_of(results.finals[cell], "train_loss", last).ends for cell in cells):
        label = "diverged after this epoch"
        handles["diverged"] = Line2D([], [], label=label, linestyle="none", color="0.3", **CROSS)
    columns = len(results.study.methods) + ("diverged" in handles)
    figure.legend(
        handles=list(handles.values()), loc="outside lower center", frameon=False, handlelength=3.4,
        ncols=columns if 1 < columns <= 4 else 4,
    )  # fmt: skip


def title_of(dataset: str) -> str:
    """Title of a data set: MNIST for ``mnist``, the name in ``name=path.npz``."""
    return SOURCES[dataset].title if dataset in SOURCES else short_name(dataset)


def drawable(text: str) -> str:
    """Removes what matplotlib would read as mathematics, or an SVG file cannot hold."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return (shown if len(shown) <= 24 else shown[:23] + "…").replace("$", r"\$")


def format_size(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


def format_percent(value: float) -> str:
    """Formats an error with as many digits as tell small ones apart."""
    return f"{value:.{0 if value >= 0.1 else 1 if value >= 0.01 else 2}%}"


def clean_axes(axes: Any) -> None:
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, width=0.7, length=3)
