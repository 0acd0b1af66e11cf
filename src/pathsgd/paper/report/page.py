"""The report as one file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pathsgd.console.files import write_atomically
from pathsgd.paper.experiment.results import Results
from pathsgd.paper.figures.style import title_of
from pathsgd.paper.optimizers import find_method
from pathsgd.paper.report import sections
from pathsgd.paper.report.css import CSS
from pathsgd.paper.report.markup import Markup, escaped, tag
from pathsgd.paper.summary import Claim, Table

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main>
"""
LINKS = {
    "claims": "Claims",
    "figures": "Figures",
    "tables": "Tables",
    "step-sizes": "Step sizes",
    "configuration": "Configuration",
    "manifest": "Versions",
}


def write_report(
    results: Results, tables: list[Table], claims: list[Claim], figures: list[Path], path: Path
) -> None:
    """Everything in one page, figures included: it opens without a network, and runs no script."""
    title = f"Path-SGD on {', '.join(map(title_of, results.study.datasets))}"
    parts = {
        "claims": sections.claims_section(claims) if claims else None,
        "figures": sections.figures_section(results, figures) if figures else None,
        "tables": sections.tables_section(tables) if tables else None,
        "step-sizes": sections.search_section(results),
        "configuration": sections.configuration_section(results),
        "manifest": sections.manifest_section(results),
    }
    shown = {name: part for name, part in parts.items() if part is not None}
    links = tag("nav", *(tag("a", LINKS[name], href=f"#{name}") for name in shown))
    header = tag(
        "header", tag("h1", title), tag("p", _lede(results), class_="lede"), _verdicts(claims), links
    )
    head = HEAD.format(title=escaped(title), css=CSS)
    body = "\n".join([header, *shown.values()])
    write_atomically(path, f"{head}{body}\n</main>\n</body>\n</html>\n".encode("utf-8", "backslashreplace"))


def _lede(results: Results) -> str:
    study = results.study
    methods = ", ".join(find_method(name).label for name in study.methods)
    kind = "a convolutional network" if study.net == "conv" else "hidden layers"
    net = f"{kind} of {', '.join(map(str, study.hidden))} ReLU units"
    runs = sum(map(len, results.finals.values()))
    devices = dict.fromkeys(str(one.get("device", "?")) for one in results.manifests)
    device = " and ".join(devices) or "a device that was not recorded"
    return (
        f"{methods}, compared as in the Path-SGD paper of Neyshabur, Salakhutdinov and Srebro (2015): {net}, "
        f"batches of {study.batch}, {runs} final runs of {study.epochs} epochs on {device}."
    )


def _verdicts(claims: list[Claim]) -> Markup:
    if not claims:
        return Markup("")
    counts = Counter(claim.verdict for claim in claims)
    badges = [
        Markup(" " + sections.badge(verdict, f"{counts[verdict]} {verdict}"))
        for verdict in ("held", "not held", "not tested")
        if counts[verdict]
    ]
    return tag("p", "Claims of the paper:", *badges)
