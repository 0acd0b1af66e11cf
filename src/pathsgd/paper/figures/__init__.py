"""The paper's figures, drawn from what a study has recorded."""

from pathsgd.paper.figures.draw import draw_all as draw_all
