"""The paper's figures, drawn from what a study has recorded."""

from pathsgd.paper.figures.all_figures import draw_all as draw_all
