"""The parts of the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pathsgd.paper.config import Study
from pathsgd.paper.config_json import field_docs
from pathsgd.paper.experiment.manifest import Manifest
from pathsgd.paper.experiment.results import Choice, Results, Tried, describe
from pathsgd.paper.figures.captions import caption
from pathsgd.paper.figures.style import size, title_of
from pathsgd.paper.optimizers import find_method
from pathsgd.paper.report.markup import Markup, picture, section, table, tag
from pathsgd.paper.summary import AGAINST, Claim, Table


def claims_section(claims: Sequence[Claim]) -> Markup:
    return section("claims", "Claims of the paper", tag("ol", *map(_claim, claims), class_="claims"))


def badge(verdict: str, text: str) -> Markup:
    return tag("span", text, class_=f"badge {verdict.replace(' ', '-')}")


def _claim(claim: Claim) -> Markup:
    evidence = tag("ul", *map(_evidence, claim.evidence), class_="evidence")
    text = tag("p", claim.text, " ", badge(claim.verdict, claim.verdict), class_="claim-text")
    body = tag("div", text, *([evidence] if claim.evidence else []))
    return tag("li", tag("span", f"{claim.number}.", class_="claim-number"), body)


def _evidence(text: str) -> Markup:
    return tag("li", text, class_="against") if text.startswith(AGAINST) else tag("li", text)


def figures_section(results: Results, figures: Sequence[Path]) -> Markup:
    """Files that differ in their kind alone are one figure."""
    names = dict.fromkeys(path.stem for path in figures)
    return section("figures", "Figures", *(_figure(name, results, figures) for name in names))


def _figure(name: str, results: Results, figures: Sequence[Path]) -> Markup:
    said = caption(name, results) or name
    image = picture([path for path in figures if path.stem == name], said.split(":")[0])
    return tag("figure", tag("div", image, class_="wide"), tag("figcaption", said), id=name)


def tables_section(tables: Sequence[Table]) -> Markup:
    return section("tables", "Tables", *(table(one.title, one.head, one.rows, one.note) for one in tables))


def search_section(results: Results) -> Markup:
    """Every step size that was tried, by data set and dropout."""
    groups: dict[tuple[str, float], list[Choice]] = {}
    for choice in results.choices:
        groups.setdefault((choice.cell.dataset, choice.cell.dropout), []).append(choice)
    note = (
        f"The lowest validation error of {results.study.search_epochs} epochs on "
        f"{results.study.validation} points kept out, below it the epoch that reached it first. The chosen "
        "step size is marked. Stopped: not below 90% of guessing after a third of the epochs."
    )
    parts = [_search_table(dataset, dropout, own) for (dataset, dropout), own in groups.items()]
    return section("step-sizes", "Step sizes tried", tag("p", note), *parts, _mishaps(results))


def _search_table(dataset: str, dropout: float, choices: Sequence[Choice]) -> Markup:
    sizes = list(dict.fromkeys(tried.step_size for choice in choices for tried in choice.tried))
    rows = []
    for choice in choices:
        by_size = {tried.step_size: tried for tried in choice.tried}
        name = f"{find_method(choice.cell.method).label}, {choice.cell.init}"
        chosen = "none ended well" if choice.step_size is None else size(choice.step_size)
        rows.append([name, chosen, *(_tried(by_size.get(s), choice.step_size) for s in sizes)])
    title = f"{title_of(dataset)}, {f'dropout {dropout:g}' if dropout else 'no dropout'}"
    return tag("div", table(title, ["", "chosen", *map(size, sizes)], rows), class_="search")


def _tried(tried: Tried | None, chosen: float | None) -> Markup:
    if tried is None:
        return Markup("")
    error = f"{tried.best_error:.2%}" if tried.best_epoch else "–"
    below = {"done": f"epoch {tried.best_epoch}"}.get(tried.status, tried.status)
    shown = tag("mark", error, class_="chosen") if tried.step_size == chosen else tag("span", error)
    return Markup(
        shown + tag("span", below, class_="small", **({"title": tried.reason} if tried.reason else {}))
    )


def _mishaps(results: Results) -> Markup:
    """Final runs that did not end well."""
    lines = []
    for cell, runs in results.finals.items():
        ended = [run for run in runs if run.status != "done"]
        if ended:
            reasons = "; ".join(dict.fromkeys(run.reason or run.status for run in ended))
            lines.append(
                f"{describe(cell)}: {len(ended)} of {len(runs)} final runs {ended[0].status} ({reasons})"
            )
    if not lines:
        return Markup("")
    return Markup(
        tag("p", "Final runs that did not end well:") + tag("ul", *(tag("li", one) for one in lines))
    )


def configuration_section(results: Results) -> Markup:
    study, docs = results.study, field_docs(Study)
    rows = [
        [
            field.name.replace("_", " "),
            _shown(field.name, getattr(study, field.name)),
            docs.get(field.name, ""),
        ]
        for field in dataclasses.fields(study)
    ]
    data = [
        [title_of(name), f"{info.train} + {info.test}", _code(info.checksum)]
        for name, info in results.data.items()
    ]
    return section(
        "configuration", "Configuration",
        table("The study", ["option", "value", "meaning"], rows),
        table("The data", ["data set", "points", "checksum"], data),
    )  # fmt: skip


def _shown(name: str, value: Any) -> str:
    if name == "datasets":
        return ", ".join(map(title_of, value))
    if isinstance(value, tuple):
        return ", ".join(_shown("", one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return size(value) if isinstance(value, float) else str(value)


def _code(value: object) -> Markup:
    return tag("code", value)


def manifest_section(results: Results) -> Markup:
    """A column for every process that trained some of the runs."""
    flat = [dict(_flat(one)) for one in results.manifests]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [[name, *(_code(one.get(name, "")) for one in flat)] for name in names]
    return section("manifest", "Where the numbers come from", table("", [""] * (1 + len(flat)), rows))


def _flat(manifest: Manifest) -> Iterator[tuple[str, object]]:
    for name, value in manifest.items():
        if isinstance(value, dict):
            yield from ((f"{name}: {key}", one) for key, one in value.items())
        else:
            yield name, "not known" if value is None else value
