"""Small networks as drawings: units are circles, edges are arrows as wide as their weights are large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pathsgd.paper.figures.one_step_examples import OneStepExample, SmallNet

Point = tuple[float, float]
HEIGHT = 0.8
STAGES = ("before", "after one SGD step", "after one Path-SGD step")


def draw_example(axes: Any, example: OneStepExample, width: float) -> None:
    """Two rows, the balanced network and the unbalanced one; a column for each stage, one unit wide."""
    axes.set_axis_off()
    axes.set_xlim(0, 3)
    axes.set_ylim(0, 2.5)
    gaps = (0.0, example.sgd_gap, example.path_gap)
    for column, (stage, gap) in enumerate(zip(STAGES, gaps, strict=True)):
        middle, differs = column + 0.5, gap > 1e-9
        verdict = f"outputs differ by {format_number(gap)}" if differs else "same function"
        weight, style = ("bold", "normal") if differs else ("normal", "italic")
        axes.text(middle, 2.5, stage, ha="center", va="top", fontsize=9, fontweight="bold")
        axes.text(middle, 0, verdict, ha="center", va="bottom", fontsize=9, fontweight=weight, style=style)
        if column:
            axes.plot([column] * 2, [0, 2.45], color="0.85", linewidth=0.8)
    for name, steps, bottom in (
        ("balanced", example.balanced, 1.42),
        ("unbalanced", example.unbalanced, 0.3),
    ):
        axes.text(0, bottom + 0.4, name, rotation=90, ha="left", va="center", fontsize=9)
        for column, net in enumerate((steps.before, steps.sgd, steps.path)):
            corner = column + 0.13, bottom
            _draw_net(axes, net, example.x, corner, width, steps.before if column else None)


def _draw_net(
    axes: Any, net: SmallNet, x: Sequence[float], corner: Point, width: float, before: SmallNet | None
) -> None:
    """Inputs on the left, outputs on the right. A chain has room for the changes of its weights, too."""
    sizes = [len(x), *(len(layer) for layer in net.layers)]
    places = [
        [
            (
                corner[0] + k / (len(sizes) - 1) * width,
                corner[1] + (1 - unit / (count - 1) if count > 1 else 0.5) * HEIGHT,
            )
            for unit in range(count)
        ]
        for k, count in enumerate(sizes)
    ]
    for k, layer in enumerate(net.layers):
        for unit, row in enumerate(layer):
            for source, weight in enumerate(row):
                ends = places[k][source], places[k + 1][unit]
                _draw_edge(axes, *ends, weight, level=source == unit)
                if before is not None and max(sizes) == 1:
                    _draw_change(axes, *ends, weight - before.layers[k][unit][source])
    for k, layer_places in enumerate(places):
        for unit, place in enumerate(layer_places):
            inner = "white" if k else "0.88"
            axes.plot(*place, "o", markersize=15, color=inner, markeredgecolor="0.15", zorder=4)
            if k == 0:
                axes.text(
                    *place, format_number(x[unit]), ha="center", va="center_baseline", fontsize=8, zorder=5
                )
    for place, output in zip(places[-1], net.outputs, strict=True):
        axes.annotate(
            format_number(output), place, (11, 0), textcoords="offset points", va="center", fontsize=9,
            fontweight="bold",
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
        format_number(weight), place, (0, 3 if level else 0), textcoords="offset points", ha="center",
        va="bottom" if level else "center", fontsize=8, bbox=box, zorder=3,
    )  # fmt: skip


def _draw_change(axes: Any, start: Point, end: Point, by: float) -> None:
    place = [(a + b) / 2 for a, b in zip(start, end, strict=True)]
    axes.annotate(
        f"{by:+.5g}", place, (0, -5), textcoords="offset points", ha="center", va="top", fontsize=8,
        color="0.35", style="italic",
    )  # fmt: skip


def format_number(value: float) -> str:
    return f"{value:.5g}"
