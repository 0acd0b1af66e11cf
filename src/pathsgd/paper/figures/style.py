"""How things look: each method has a colour, a lightness and a marker of its own, each start a line style."""

from __future__ import annotations

from typing import Any

from pathsgd.paper.data.dataset import short_name
from pathsgd.paper.data.sources import SOURCES

METHOD_STYLES: dict[str, tuple[str, str]] = {
    "sgd": ("#2f74c0", "s"),
    "adagrad": ("#efa92b", "^"),
    "path-sgd": ("#6b0f1a", "o"),
    "momentum": ("#62b5e5", "D"),
    "adam": ("#2a9d6f", "v"),
    "adamw": ("#8fcfa8", "<"),
    "muon": ("#9a77c7", "P"),
    "path-momentum": ("#c2452d", "X"),
    "path-adagrad": ("#8a5a16", "p"),
    "path-adam": ("#0b4a2c", "h"),
    "path-adamw": ("#3b1054", "d"),
}
"""Colour and marker. The paper's three differ in lightness too: dark, middle, light."""

LINES = {"balanced": "-", "unbalanced": (0, (4, 1.6)), "powers-of-two": ":"}

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 9,
    "axes.linewidth": 0.7,
    "axes.titlesize": 10,
    "svg.fonttype": "path",
    "svg.hashsalt": "pathsgd",  # names in the file are made from it: the same figure, the same bytes
    "path.simplify": True,
}


def method_style(name: str) -> tuple[str, str]:
    return METHOD_STYLES.get(name, ("0.35", "."))


def title_of(dataset: str) -> str:
    """``mnist`` is MNIST; of ``name=path.npz`` the name."""
    return SOURCES[dataset].title if dataset in SOURCES else short_name(dataset)


def drawable(text: str) -> str:
    """Without what matplotlib would read as mathematics, or an SVG file cannot hold."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return (shown if len(shown) <= 24 else shown[:23] + "…").replace("$", r"\$")


def format_size(value: float) -> str:
    """A step size: 0.01, 1e-5."""
    return f"{value:g}".replace("e-0", "e-")


def format_percent(value: float) -> str:
    """Of an error: as many digits as tell small ones apart."""
    return f"{value:.{0 if value >= 0.1 else 1 if value >= 0.01 else 2}%}"


def clean_axes(axes: Any) -> None:
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, width=0.7, length=3)
