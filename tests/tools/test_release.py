"""What stands in several files says the same in all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pathsgd

ROOT = Path(__file__).resolve().parents[2]


def find(file, pattern):
    (found,) = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return found


@pytest.mark.parametrize(
    ("file", "pattern"),
    [("CITATION.cff", r"^version: (\S+)$"), ("conda/meta.yaml", r'^{% set version = "(\S+)" %}$')],
)
def test_the_version(file, pattern):
    assert find(file, pattern) == pathsgd.__version__


def test_the_changelog_begins_with_the_version():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first is not None
    assert first[1] == pathsgd.__version__


def test_the_oldest_torch():
    oldest = find("pyproject.toml", r'^dependencies = \["torch>=(\S+)"\]')
    assert find("constraints-oldest.txt", r"^torch==(\S+)$") == f"{oldest}.0"
    assert find("conda/meta.yaml", r"^    - pytorch >=(\S+)$") == oldest


def test_the_versions_of_development():
    assert find("pyproject.toml", r"^constraint-dependencies = \[(.*)\]") == (
        f'"torch=={find("constraints.txt", r"^torch==(.*)$")}"'
    )
    assert find(".pre-commit-config.yaml", r"^    rev: v(\S+)") == find("constraints.txt", r"^ruff==(\S+)$")
