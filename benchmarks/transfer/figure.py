"""Curves over the rate: one panel a method, one line a network. One rate for all is one valley for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .methods import LABELS
from .networks import NETWORKS
from .records import Cell, Cells, cells_of
from .train import Record

MAX_RATIO = 2.0  # to the best of a network; what is above, or diverged, is drawn there
OURS = ("path-adam", "path-muon", "balanced-muon", "relative-muon", "relative-adam")
MAPS = {
    "MLP": "Blues",
    "VGG": "Oranges",
    "ResNet": "Greens",
    "GPT": "Purples",
    "small": "Greys",
    "others": "Reds",
    "deep": "pink_r",
}


def draw_figure(records: Sequence[Record], into: Path, epochs: int = 5) -> Path:
    """Draws ``into/rates.png``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    cells = {k: c for k, c in cells_of(records).items() if k[2] == "balanced" and k[3] == epochs}
    methods = [m for m in LABELS.values() if any(_is_curve(c) for k, c in cells.items() if k[1] == m)]
    if not methods:
        raise ValueError("no method was recorded at three rates or more: there is no curve to draw")
    # What ours were not run on at several rates would make the panels of the others alone look worse.
    ours = [LABELS[name] for name in OURS if LABELS[name] in methods]
    cells = {k: c for k, c in cells.items() if all(_is_curve(cells.get((k[0], m, *k[2:]), [])) for m in ours)}
    columns = min(5, len(methods))
    lines = -(-len(methods) // columns)
    size = (3.2 * columns, 2.8 * lines + 1.5)
    figure, axes = plt.subplots(
        lines, columns, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    colours = _colours(plt)
    shown: dict[str, Any] = {}
    for axis in axes.flat[len(methods) :]:
        axis.set_visible(False)
    for axis, method in zip(axes.flat, methods, strict=False):
        shown |= _draw_panel(axis, cells, method, colours)
    widest = max(math.log(axis.get_xlim()[1] / axis.get_xlim()[0]) for axis in axes.flat[: len(methods)])
    for axis in axes.flat[: len(methods)]:  # the same length is the same factor in every panel
        low, high = axis.get_xlim()
        middle, factor = math.sqrt(low * high), math.exp(widest / 2)
        axis.set_xlim(middle / factor, middle * factor)
        axis.xaxis.set_minor_formatter(NullFormatter())
    for row in axes:
        row[0].set_ylabel("validation, of the network's best")
    handles = [shown[n] for n in NETWORKS if n in shown]
    figure.legend(handles, [h.get_label() for h in handles], loc="outside lower center", fontsize=8, ncols=5)
    into.mkdir(parents=True, exist_ok=True)
    path = into / "rates.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _is_curve(group: Sequence[Cell]) -> bool:
    return len({cell.rate for cell in group}) > 2


def _colours(plt: Any) -> dict[str, Any]:
    """A colour a family, darker with width."""
    families: dict[str, list[str]] = {}
    for name, network in NETWORKS.items():
        families.setdefault(network.family, []).append(name)
    return {
        name: plt.get_cmap(MAPS[family])(0.4 + 0.6 * (k + 1) / len(names))
        for family, names in families.items()
        for k, name in enumerate(names)
    }


def _draw_panel(axis: Any, cells: Cells, method: str, colours: dict[str, Any]) -> dict[str, Any]:
    lines = {}
    for (network, of, *_), group in cells.items():
        if of != method or not _is_curve(group):
            continue
        best = min(
            c.values[0] for k, g in cells.items() if k[0] == network for c in g if c.values[0] is not None
        )
        points: dict[float, float] = {}
        for cell in group:
            value = MAX_RATIO if cell.values[0] is None else min(MAX_RATIO, cell.values[0] / best)
            points[cell.rate] = min(value, points.get(cell.rate, MAX_RATIO))
        x, y = list(points), list(points.values())
        label = NETWORKS[network].label
        (lines[network],) = axis.plot(x, y, color=colours[network], label=label, marker=".", linewidth=1.2)
        low = min(range(len(y)), key=y.__getitem__)
        axis.plot(x[low], y[low], color=colours[network], marker="o", markersize=5)
        for cell in group:
            if cell.lr is None:
                axis.axvline(cell.rate, color="black", linewidth=0.6, linestyle=":")
    axis.set(xscale="log", title=method, xlabel="learning rate", ylim=(0.97, MAX_RATIO + 0.03))
    axis.grid(alpha=0.2)
    return lines
