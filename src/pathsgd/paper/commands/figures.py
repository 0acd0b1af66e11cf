"""``pathsgd figures``: everything a study is shown by, from its recorded numbers alone."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from pathsgd.paper import cost
from pathsgd.paper.claims import claims
from pathsgd.paper.experiment import store
from pathsgd.paper.experiment.results import Results
from pathsgd.paper.figures import draw_all
from pathsgd.paper.report import write_report
from pathsgd.paper.tables import printed, printed_claims, tables

HELP = "redraw the figures and the report of a study"
DESCRIPTION = """\
Draws the paper's figures 1 to 5, prints the tables and the claims, and writes report.html, from
the numbers that `pathsgd reproduce` recorded in a folder. Nothing is trained."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder of a study (--out of `pathsgd reproduce`)")


def run(options: argparse.Namespace) -> int:
    conclude(Results.load(options.folder))
    return 0


def conclude(results: Results) -> None:
    """Tables, claims, figures and report, printed and written beside the runs."""
    out = results.out
    found, judged = tables(results), claims(results, cost.read(out))
    store.write_json(out / "claims.json", [dataclasses.asdict(claim) for claim in judged])
    print("drawing the figures", flush=True)
    drawn = draw_all(results, out / "figures")
    for old in set((out / "figures").glob("figure*.*")) - set(drawn):
        old.unlink()  # of another study in the same place
    write_report(results, found, judged, drawn, out / "report.html")
    for table in found:
        print("\n" + printed(table))
    print("\n" + printed_claims(judged))
    print(f"\nfigures: {out / 'figures'}\nreport:  {out / 'report.html'}")
