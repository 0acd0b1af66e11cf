"""Report of a study: one HTML page, rendered from the template report.html."""

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from study.claims import LAST_EPOCHS, Claim
from study.figures import find_pair
from study.files import write_atomically
from study.learning_curves import first_part, format_size, title_of
from study.methods import METHODS
from study.runs import StudyResults, describe
from study.tables import COMPARISON_HEAD, Table, explain_demo, tabulate_choices

LARGEST_SVG = 600_000  # bytes above which a figure is embedded as PNG
IMAGE_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


def write_report(
    results: StudyResults, tables: list[Table], claims: list[Claim], figures: list[Path], path: Path
) -> None:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    study, pair, flat = results.study, find_pair(results), [dict(_flatten(one)) for one in results.manifests]
    page = environment.get_template("report.html").render(
        title=f"Path-SGD on {', '.join(map(title_of, study.datasets))}",
        methods=[METHODS[name].label for name in study.methods],
        runs=sum(map(len, results.finals.values())),
        seeds=results.seeds,
        devices=list(dict.fromkeys(str(one.get("device", "?")) for one in results.manifests)),
        figure1=pair and f"{METHODS[pair[0].method].label} on {title_of(pair[0].dataset)}",
        part=first_part(study.epochs),
        study=study,
        claims=claims,
        verdicts=Counter(claim.verdict for claim in claims),
        comparison_head=COMPARISON_HEAD,
        demo=explain_demo(results),
        last=LAST_EPOCHS,
        figures=[_embed(name, figures) for name in dict.fromkeys(path.stem for path in figures)],
        tables=tables,
        search=tabulate_choices(results.choices),
        choices=results.choices,
        failures=list(_list_failures(results)),
        options=[[n.replace("_", " "), _format(n, value)] for n, value in vars(study).items()],
        data=[[title_of(n), f"{one.train} + {one.test}", one.checksum] for n, one in results.data.items()],
        manifest=[
            [name, *(str(one.get(name, "")) for one in flat)]
            for name in dict.fromkeys(name for one in flat for name in one)
        ],
    )
    write_atomically(path, page.encode("utf-8", "backslashreplace"))


def _embed(name: str, figures: Sequence[Path]) -> dict[str, str]:
    """Embeds the SVG of a figure, or its PNG where that is large."""
    kinds = {path.suffix: path for path in figures if path.stem == name}
    chosen = kinds[".png" if kinds[".svg"].stat().st_size > LARGEST_SVG else ".svg"]
    # As an image rather than inline: two figures may use the same ids.
    content = base64.b64encode(chosen.read_bytes()).decode()
    return {"name": name, "source": f"data:{IMAGE_TYPES[chosen.suffix]};base64,{content}"}


def _list_failures(results: StudyResults) -> Iterator[str]:
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


def _flatten(manifest: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in manifest.items():
        if isinstance(value, dict):
            yield from ((f"{name}: {key}", one) for key, one in value.items())
        else:
            yield name, "not known" if value is None else value
