"""Draws the numbers of step_cost: one panel of networks, and one for each sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .step_cost import BESIDE, SWEPT, Row

AXES = {"batch": "batch size, 784-4000-4000-10", "width": "width of 784-w-w-10", "depth": "layers of 1024"}
STYLES = dict(zip(SWEPT, (("0.4", "o", "-"), ("C0", "s", "-"), ("C1", "^", "--")), strict=True))
"""Colour, marker, line, which differ in grey, too."""
MARKERS, SHADES = "os^Dv<>ph", ("0.0", "0.5", "0.75")
"""Marks of networks."""
MAX_RATIO = 2.6
"""Upper end of the axes of a sweep; larger ratios are written there."""


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    studies = [study for study in AXES if any(row.study == study for row in rows)]
    figure = Figure(figsize=(11, 7.5 if studies else 4.2), layout="constrained")
    top, *bottom = figure.subfigures(2 if studies else 1, 1, squeeze=False)[:, 0]
    _draw_networks(top.subplots(), [row for row in rows if row.study == "networks"])
    if studies:
        panels = bottom[0].subplots(1, len(studies), squeeze=False)[0]
        for panel, study in zip(panels, studies, strict=True):
            _draw_sweep(panel, [row for row in rows if row.study == study], AXES[study])
        panels[0].set_ylabel(f"training step / that of {SWEPT[0]}")
        panels[-1].legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(f"Whole training step relative to torch's optimizer of the same kind: {title}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_networks(axes: Any, rows: Sequence[Row]) -> None:
    """A line for each method, a mark on it for each network."""
    nets = list(dict.fromkeys((row.net, row.precision) for row in rows))
    measured = {row.method for row in rows}
    methods = [name for name, beside in BESIDE.items() if beside != name and name in measured]
    for k, (net, precision) in enumerate(nets):
        marker, shade = MARKERS[k % len(MARKERS)], SHADES[k // 2 % len(SHADES)]
        marks = [
            row for row in rows if (row.net, row.precision) == (net, precision) and row.method in methods
        ]
        if not marks:
            continue
        places = [methods.index(row.method) for row in marks]
        label = f"{net}, {precision}, batch {marks[0].batch}"
        axes.plot(
            [row.ratio for row in marks], places, marker, color=shade, markersize=5, label=label,
            markerfacecolor="none" if shade == "0.0" and marker == "s" else shade,
        )  # fmt: skip
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    largest = max((row.ratio for row in rows if row.ratio == row.ratio), default=1.0)
    ticks = [t for t in (0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20) if t <= largest * 1.2]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="both", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("training step / that of torch's optimizer of the same kind")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))  # beside the marks
    axes.spines[["top", "right"]].set_visible(False)


def _draw_sweep(axes: Any, rows: Sequence[Row], label: str) -> None:
    for method, (colour, marker, line) in STYLES.items():
        points = sorted((row for row in rows if row.method == method), key=lambda row: row.at)
        axes.plot(
            [row.at for row in points], [min(row.ratio, MAX_RATIO) for row in points], color=colour,
            marker=marker, linestyle=line, markersize=4, label=method,
        )  # fmt: skip
        for row in points:
            if row.ratio > MAX_RATIO:
                axes.text(row.at, MAX_RATIO, f"{row.ratio:.1f}\u2191 ", ha="right", va="center", fontsize=8)
    axes.set_xscale("log", base=2)
    ticks = sorted({row.at for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7)
    axes.set_xlabel(label)
    axes.set_ylim(0.9, MAX_RATIO + 0.05)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
