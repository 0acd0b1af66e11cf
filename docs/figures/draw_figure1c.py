"""Draws docs/figures/figure1c.svg, panel (c) of the paper's Figure 1, from computed steps.

Run it from the root of the repository: PYTHONPATH=. python docs/figures/draw_figure1c.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from study.figures import draw_example, poor_updates


def draw(path: Path) -> None:
    figure = Figure(figsize=(11, 3.9), layout="constrained", facecolor="white")
    draw_example(figure.subplots(), poor_updates(), width=0.64)
    # Without ids and dates that change from run to run, so that drawing it again changes nothing.
    with matplotlib.rc_context({"svg.hashsalt": "pathsgd"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("figure1c.svg"))
