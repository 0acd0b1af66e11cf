"""Prepares docstrings for the site: roles such as :func:`pathsgd.trace` become links."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """The extension that mkdocs.yml names."""

    def __init__(self) -> None:
        super().__init__()
        self.public: set[str] = set()

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self.public = set(map(str, pkg.exports or ()))
        self._visit(pkg)

    def _visit(self, parent: Any) -> None:
        for member in parent.members.values():
            if member.is_alias:
                continue
            if member.docstring is not None:
                text = ROLE.sub(self._link, member.docstring.value)
                member.docstring.value = re.sub(
                    r"^Example:$", "Examples:", text, flags=re.MULTILINE
                )
            self._visit(member)

    def _link(self, match: re.Match[str]) -> str:
        name = match[1].removeprefix("pathsgd.")
        if name.split(".")[0] in self.public and not name.startswith("functional"):
            return f"[`{match[1]}`][pathsgd.{name}]"
        return f"`{match[1]}`"
