"""The measurements as a figure: one panel of networks, and one for each sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pathsgd.errors import PathError
from pathsgd.paper.bench.measure import Row
from pathsgd.paper.bench.methods import BASELINE, METHODS, SWEPT

AXES = {"batch": "batch size, 784-4000-4000-10", "width": "width of 784-w-w-10", "depth": "layers of 1024"}
STYLES = dict(zip(SWEPT, (("0.4", "o", "-"), ("C0", "s", "-"), ("C1", "^", "--")), strict=True))
"""Colour, marker, line: told apart in grey too."""


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PathError("a plot needs matplotlib: pip install 'pathsgd[paper]'") from error
    studies = [study for study in AXES if any(row.study == study for row in rows)]
    figure = Figure(figsize=(11, 7.5 if studies else 4.2), layout="constrained")
    top, *bottom = figure.subfigures(2 if studies else 1, 1, squeeze=False)[:, 0]
    _networks(top.subplots(), [row for row in rows if row.study == "networks"])
    if studies:
        panels = bottom[0].subplots(1, len(studies), squeeze=False)[0]
        for panel, study in zip(panels, studies, strict=True):
            _sweep(panel, [row for row in rows if row.study == study], AXES[study])
        panels[0].set_ylabel("training step / that of fused SGD")
        panels[0].legend(frameon=False)
    figure.suptitle(f"Whole training step relative to torch.optim.SGD(fused=True): {title}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _networks(axes: Any, rows: Sequence[Row]) -> None:
    nets = list(dict.fromkeys((row.net, row.tf32) for row in rows))
    methods = [name for name in METHODS if name != BASELINE and any(row.method == name for row in rows)]
    height = 0.8 / len(nets)
    for k, (net, tf32) in enumerate(nets):
        found = {row.method: row.ratio for row in rows if (row.net, row.tf32) == (net, tf32)}
        own = [name for name in methods if name in found]
        places = [methods.index(name) + (k - (len(nets) - 1) / 2) * height for name in own]
        shade = str(0.25 + 0.55 * k / max(len(nets) - 1, 1))
        values = [found[name] for name in own]
        label = f"{net}{', tf32' if tf32 else ''}"
        axes.barh(places, values, height * 0.92, color=shade, label=label)
        for place, value in zip(places, values, strict=True):
            axes.text(value, place, f" {value:.2f}", va="center", fontsize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0.8)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)


def _sweep(axes: Any, rows: Sequence[Row], label: str) -> None:
    for method, (colour, marker, line) in STYLES.items():
        own = sorted((row for row in rows if row.method == method), key=lambda row: row.at)
        axes.plot(
            [row.at for row in own], [row.ratio for row in own], color=colour, marker=marker, linestyle=line,
            markersize=4, label=method,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    ticks = sorted({row.at for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7)
    axes.set_xlabel(label)
    axes.set_ylim(bottom=0.9)
    axes.spines[["top", "right"]].set_visible(False)
