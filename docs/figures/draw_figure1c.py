"""Draws docs/figures/figure1c.svg, panel (c) of the paper's Figure 1, from computed steps.

Run it from the root of the repository: python docs/figures/draw_figure1c.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from pathsgd.paper.figures.network_diagram import draw_example
from pathsgd.paper.figures.one_step_examples import poor_updates

# Ids and dates that change from run to run are left out, so that drawing it again changes nothing.
matplotlib.rcParams["svg.hashsalt"] = "pathsgd"
figure = Figure(figsize=(11, 3.9), layout="constrained", facecolor="white")
draw_example(figure.subplots(), poor_updates(), width=0.64)
figure.savefig(Path(__file__).with_name("figure1c.svg"), metadata={"Date": None, "Creator": None})
