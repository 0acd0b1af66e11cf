"""HTML from text. Whatever is text is escaped here, in one place."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

LARGEST_SVG = 600_000
"""Bytes from which on a figure is embedded as PNG."""

TYPES = {".svg": "image/svg+xml", ".png": "image/png"}
NUMBER = re.compile(r"^[<~≈]?[-+−]?\d")


class Markup(str):
    """What is HTML already."""


def escaped(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def tag(name: str, *content: object, **attributes: str) -> Markup:
    """``tag("p", "a < b", class_="note")`` is ``<p class="note">a &lt; b</p>``."""
    given = "".join(f' {key.rstrip("_")}="{html.escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>{''.join(map(escaped, content))}</{name}>")


def section(anchor: str, title: str, *content: object) -> Markup:
    return tag("section", tag("h2", title), "\n", *content, id=anchor)


def table(title: str, head: Sequence[object], rows: Sequence[Sequence[object]], note: str = "") -> Markup:
    """Columns of numbers are set to the right. It scrolls by itself where the page is narrow."""
    numeric = [
        any(row[k] for row in rows) and all(not row[k] or bool(NUMBER.match(str(row[k]))) for row in rows)
        for k in range(len(head))
    ]
    columns = tag("tr", *(_cell("th", h, right, scope="col") for h, right in zip(head, numeric, strict=True)))
    body = [tag("tr", *(_in_row(k, value, numeric[k]) for k, value in enumerate(row))) for row in rows]
    inner = tag("table", *([tag("thead", columns)] if any(head) else []), "\n", tag("tbody", *body))
    return tag(
        "figure",
        *([tag("figcaption", title)] if title else []),
        tag("div", inner, class_="scroll", tabindex="0"),
        *([tag("p", note, class_="note")] if note else []),
        class_="table",
    )


def _in_row(k: int, value: object, right: bool) -> Markup:
    return _cell("th", value, right, scope="row") if k == 0 else _cell("td", value, right)


def _cell(name: str, value: object, right: bool, **attributes: str) -> Markup:
    return tag(name, value, **attributes, **({"class_": "number"} if right else {}))


def picture(paths: Sequence[Path], alternative: str) -> Markup:
    """One of several files of the same figure: the SVG, unless it is large and there is a PNG."""
    kinds = {path.suffix: path for path in paths if path.suffix in TYPES}
    chosen = kinds.get(".svg") or kinds[".png"]
    if ".png" in kinds and chosen.stat().st_size > LARGEST_SVG:
        chosen = kinds[".png"]
    # As an image of its own rather than inline: two figures may then use the same ids.
    data = base64.b64encode(chosen.read_bytes()).decode()
    source = f"data:{TYPES[chosen.suffix]};base64,{data}"
    return Markup(f'<img src="{source}" alt="{html.escape(alternative)}">')
