"""The paper's figures, drawn as PNG and SVG from what a study has recorded, and their captions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

from study.curves import first_part
from study.figure1 import draw_figure1, find_pair
from study.files import write_atomically
from study.learning_curves import draw_learning, title_of
from study.methods import METHODS
from study.results import StudyResults

DPI = 150
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "font.size": 9,
    "axes.linewidth": 0.7,
    "axes.titlesize": 10,
    "svg.fonttype": "path",
    "svg.hashsalt": "pathsgd",  # names in the file are made from it: the same figure, the same bytes
    "path.simplify": True,
}
LEARNING_CURVES = (
    "Cross-entropy, training error and test error after each epoch; those in training are measured on "
    "each batch before its step, with units dropped where there is dropout. Lines are means over the "
    "repeats, bands reach from the lowest to the highest. Unbalanced runs of invariant methods are open "
    "marks on the line of the balanced ones. The vertical range is that of the balanced runs; curves "
    "beyond it are named above the panel with the values they end at, or counted. A cross marks where a "
    "run diverged; the other runs go on as thin lines, one by one."
)
EXAMPLES = (
    "(b) One step on a chain of one hidden unit: SGD hardly moves the large weight and blows up the small "
    "one; Path-SGD moves both in proportion. In italics: the change. (c) Two networks that compute the "
    "same function: after one step of SGD they do not any more, after one of Path-SGD they do. In bold: "
    "the outputs. (b) and (c) are computed with the library, without biases."
)


def draw_all(results: StudyResults, folder: Path) -> list[Path]:
    """Writes ``figure1`` to ``figure5`` and returns their paths.

    A study without dropout has no figures 3 and 5, one with dropout only has no 2 and 4, one from a single
    start no figure 1.
    """
    epochs, written = results.study.epochs, []
    part = first_part(epochs)
    with matplotlib.rc_context(RC):
        figures = {
            "figure1": draw_figure1(results) if results.study.compares_starts else None,
            "figure2": draw_learning(results, "Figure 2", dropout=False, last=part),
            "figure3": draw_learning(results, "Figure 3", dropout=True, last=part),
            "figure4": draw_learning(results, "Figure 4", dropout=False, last=epochs),
            "figure5": draw_learning(results, "Figure 5", dropout=True, last=epochs),
        }
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


def write_caption(name: str, results: StudyResults) -> str:
    """Caption of ``figure1`` to ``figure5``."""
    if name == "figure1":
        pair = find_pair(results)
        where = pair and f"{METHODS[pair[0].method].label} on {title_of(pair[0].dataset)}"
        first = f"The training loss of {where}, balanced and unbalanced" if pair else "Nothing to show"
        return f"Figure 1: what an unbalanced start does to SGD. (a) {first}. {EXAMPLES}"
    epochs = results.study.epochs
    last = first_part(epochs) if name in ("figure2", "figure3") else epochs
    part = f"the first {last} of {epochs}" if last < epochs else f"all {last}"
    dropout = "with" if name in ("figure3", "figure5") else "without"
    return f"Figure {name[-1]}: learning curves {dropout} dropout, {part} epochs. {LEARNING_CURVES}"
