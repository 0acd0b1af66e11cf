"""``pathsgd figures``: the figures and the report of a study, from its recorded numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from pathsgd.console.command_line import parse
from pathsgd.paper import StudyResults, TerminalProgress, redraw, summarize_study


@dataclass(frozen=True)
class Figures:
    """Draws the paper's figures 1 to 5, prints the tables and the claims, and writes report.html.

    All from the numbers that `pathsgd reproduce` recorded in a folder. Nothing is trained.

    example:
      pathsgd figures pathsgd-small
    """

    folder: tyro.conf.Positional[Path]
    """The folder of a study: --out of `pathsgd reproduce`."""


def main(arguments: Sequence[str]) -> int:
    options = parse(Figures, arguments, "figures")
    print_summary(redraw(options.folder, progress=TerminalProgress()))
    return 0


def print_summary(results: StudyResults) -> None:
    print(f"\n{summarize_study(results)}")
    print(f"\nfigures: {results.out / 'figures'}\nreport:  {results.out / 'report.html'}")
