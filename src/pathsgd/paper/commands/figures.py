"""``pathsgd figures``: everything a study is shown by, from its recorded numbers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from pathsgd.console.command_line import parse
from pathsgd.paper import cost
from pathsgd.paper.claims import claims
from pathsgd.paper.experiment import store
from pathsgd.paper.experiment.results import Results
from pathsgd.paper.figures import draw_all
from pathsgd.paper.report import write_report
from pathsgd.paper.tables import printed, printed_claims, tables


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
