"""The report of a study: one HTML page, rendered from the template html_report.html."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pathsgd.console.files import write_atomically
from pathsgd.console.optional_imports import import_optional
from pathsgd.paper.analysis.claims import Claim
from pathsgd.paper.analysis.statistics import LAST
from pathsgd.paper.analysis.study_tables import (
    COMPARISON_HEAD,
    Table,
    explain_demo,
    list_missing,
    tabulate_choices,
)
from pathsgd.paper.figures.captions import caption
from pathsgd.paper.figures.style import format_size, title_of
from pathsgd.paper.optimizers import METHODS
from pathsgd.paper.records.manifest import Manifest
from pathsgd.paper.records.study_results import StudyResults, describe

LARGEST_SVG = 600_000
"""Bytes above which a figure is embedded as PNG."""
IMAGE_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


def write_report(
    results: StudyResults, tables: list[Table], claims: list[Claim], figures: list[Path], path: Path
) -> None:
    """Writes everything into one page, figures included."""
    jinja2 = import_optional("jinja2", "the report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    study, flat = results.study, [dict(_flatten(one)) for one in results.manifests]
    page = environment.get_template("html_report.html").render(
        title=f"Path-SGD on {', '.join(map(title_of, study.datasets))}",
        lede=_lede(results),
        study=study,
        claims=claims,
        verdicts=Counter(claim.verdict for claim in claims),
        comparison_head=COMPARISON_HEAD,
        demo=explain_demo(results),
        last=LAST,
        missing=list_missing(results),
        figures=[_embed(name, results, figures) for name in dict.fromkeys(path.stem for path in figures)],
        tables=tables,
        search=tabulate_choices(results.choices),
        choices=results.choices,
        failures=list(_list_failures(results)),
        options=[[n.replace("_", " "), _format(n, value)] for n, value in vars(study).items()],
        data=[
            [title_of(n), f"{info.train} + {info.test}", info.checksum] for n, info in results.data.items()
        ],
        manifest=[
            [name, *(str(one.get(name, "")) for one in flat)]
            for name in dict.fromkeys(name for one in flat for name in one)
        ],
    )
    write_atomically(path, page.encode("utf-8", "backslashreplace"))


def _lede(results: StudyResults) -> str:
    study = results.study
    methods = ", ".join(METHODS[name].label for name in study.methods)
    kind = "a convolutional network" if study.net == "conv" else "hidden layers"
    net = f"{kind} of {', '.join(map(str, study.hidden))} ReLU units"
    runs = sum(map(len, results.finals.values()))
    devices = dict.fromkeys(str(one.get("device", "?")) for one in results.manifests)
    device = " and ".join(devices) or "a device that was not recorded"
    return (
        f"{methods}, compared as in the Path-SGD paper of Neyshabur, Salakhutdinov and Srebro (2015): {net}, "
        f"batches of {study.batch}, {runs} final runs of {study.epochs} epochs with {results.seeds} "
        f"seed{'s' * (results.seeds != '1')} on {device}."
    )


def _embed(name: str, results: StudyResults, figures: Sequence[Path]) -> dict[str, str]:
    """The SVG of a figure, or its PNG where that is large."""
    kinds = {path.suffix: path for path in figures if path.stem == name and path.suffix in IMAGE_TYPES}
    chosen = kinds.get(".svg") or kinds[".png"]
    if ".png" in kinds and chosen.stat().st_size > LARGEST_SVG:
        chosen = kinds[".png"]
    # As an image rather than inline: two figures may use the same ids.
    content = base64.b64encode(chosen.read_bytes()).decode()
    text = caption(name, results) or name
    source = f"data:{IMAGE_TYPES[chosen.suffix]};base64,{content}"
    return {"name": name, "source": source, "alternative": text.split(":")[0], "caption": text}


def _list_failures(results: StudyResults) -> Iterator[str]:
    """Final runs that did not end well."""
    for cell, records in results.finals.items():
        failed = [record for record in records if record.status != "done"]
        if failed:
            reasons = "; ".join(dict.fromkeys(record.reason or record.status for record in failed))
            count = f"{len(failed)} of {len(records)} final runs"
            yield f"{describe(cell)}: {count} {failed[0].status} ({reasons})"


def _format(name: str, value: Any) -> str:
    if name == "datasets":
        return ", ".join(map(title_of, value))
    if isinstance(value, tuple):
        return ", ".join(_format("", one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_size(value) if isinstance(value, float) else str(value)


def _flatten(manifest: Manifest) -> Iterator[tuple[str, object]]:
    for name, value in manifest.items():
        if isinstance(value, dict):
            yield from ((f"{name}: {key}", one) for key, one in value.items())
        else:
            yield name, "not known" if value is None else value
