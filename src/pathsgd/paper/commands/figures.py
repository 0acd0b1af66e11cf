"""``pathsgd figures``: everything a study is shown by, from its recorded numbers alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from pathsgd.paper import StudyResults, TerminalProgress, redraw, summarize_study

HELP = "redraw the figures and the report of a study"
DESCRIPTION = """\
Draws the paper's figures 1 to 5, prints the tables and the claims, and writes report.html, from
the numbers that `pathsgd reproduce` recorded in a folder. Nothing is trained."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder of a study (--out of `pathsgd reproduce`)")


def run(options: argparse.Namespace) -> int:
    conclude(redraw(options.folder, progress=TerminalProgress()))
    return 0


def conclude(results: StudyResults) -> None:
    print("\n" + summarize_study(results))
    print(f"\nfigures: {results.out / 'figures'}\nreport:  {results.out / 'report.html'}")
