"""The paper's figures, drawn as PNG and SVG from what a study has recorded."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from pathsgd.console.files import write_atomically
from pathsgd.console.optional_imports import import_optional
from pathsgd.paper.figures.curves import first_part
from pathsgd.paper.figures.figure1 import draw_figure1
from pathsgd.paper.figures.learning_curves import draw_learning
from pathsgd.paper.figures.style import RC
from pathsgd.paper.records.study_results import StudyResults

DPI = 150


def draw_all(results: StudyResults, folder: Path) -> list[Path]:
    """Writes ``figure1`` to ``figure5`` and returns their paths.

    A study without dropout has no figures 3 and 5, one with dropout only has no 2 and 4, one from a single
    start no figure 1.
    """
    matplotlib = import_optional("matplotlib", "drawing")
    epochs = results.study.epochs
    part = first_part(epochs)
    written = []
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
