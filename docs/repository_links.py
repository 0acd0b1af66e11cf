"""Links of the docs to files of the repository that are no pages: on the site, the path of the file."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(
    r"(?<!!)\[([^\]]*)\]\((?:\.\./)+((?:benchmarks|examples|results|src|study|tests)[^)#\s]*)\)"
)


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Called by mkdocs with each page; links lead to ``repo_url`` once mkdocs.yml has one."""
    if config.repo_url:
        return OUTSIDE.sub(rf"[\1]({config.repo_url}/blob/main/\2)", markdown)
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)
