"""Copies the pages to build/pages, for the site. Links to other files of the repository become paths."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs"
STAGED = ROOT / "build" / "pages"
REPOSITORY = ""
"""An address such as https://github.com/NAME/pathsgd/blob/main makes them links."""
LINK = re.compile(r"(\(?)(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def show_path(page: Path, match: re.Match[str]) -> str:
    """The link of a page, if it leads to a file outside of ``docs``, as text and path."""
    before, text, link, anchor = match.groups(default="")
    path = os.path.relpath((page.parent / link).resolve(), ROOT)
    if path.startswith("docs"):
        return match[0]
    if REPOSITORY:
        return f"{before}[{text}]({REPOSITORY}/{path}{anchor})"
    return f"({text}: `{path}`" if before else f"{text} (`{path}`)"


def stage() -> None:
    """Makes ``build/pages`` anew."""
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(
        PAGES, STAGED, ignore=shutil.ignore_patterns("*.py", "*.toml", "__pycache__")
    )
    for staged in STAGED.rglob("*.md"):
        show = partial(show_path, PAGES / staged.relative_to(STAGED))
        staged.write_text(LINK.sub(show, staged.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    stage()
