"""The code in README, docs and results runs as it stands there, and links lead somewhere. Pages are short."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
READ_BY_USERS = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "api"]
MAX_WORDS = 12_000
"""Of what a user reads, signs apart. Measurements and what was tried belong into results/*/README.md."""
MAX_COLUMNS = 88
"""Of a line of code on a page of 1280 pixels."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "results").rglob("*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def code_of(page):
    return BLOCK.findall(page.read_text())


def page_name(page):
    return str(page.relative_to(ROOT))


def anchors(page):
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.fixture
def rules():
    """The rules of operators, as they are outside this test: a page adds one."""
    from pathsgd.graph.rules.registry import RULES

    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page)], ids=page_name)
def test_its_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torch.manual_seed(0)
    names = {"__name__": "docs"}
    for block in code_of(page):
        exec(compile(block, page.name, "exec"), names)


def test_the_readme_shows_what_it_says(capsys):
    exec(code_of(ROOT / "README.md")[0], {"__name__": "docs"})
    sgd, path_sgd = map(float, capsys.readouterr().out.split())
    assert sgd > 1
    assert path_sgd == 0


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_its_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for path, anchor in LINK.findall(prose):
        if path.startswith("https://"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or "." in anchor or anchor in anchors(target), (
            f"{path}#{anchor}"
        )  # "." of an API name


def test_the_tests_of_the_support_matrix_exist():
    rows = [line for line in (ROOT / "tests" / "README.md").read_text().splitlines() if line.startswith("|")]
    named = [re.findall(r"`([\w/]+\.py)::(\w+)`", row) for row in rows]
    assert sum(map(len, named)) > 30
    for row, tests in zip(rows, named, strict=True):
        assert row.count("::") == len(tests), row
        for file, test in tests:
            assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (
                file,
                test,
            )


def test_figure_1c_can_be_drawn_again(tmp_path):
    runpy.run_path(str(DOCS / "figures" / "draw_figure1c.py"))["draw"](tmp_path / "figure1c.svg")
    assert "777.15" in (tmp_path / "figure1c.svg").read_text()


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    assert len(text.split()) <= 900


def test_what_a_user_reads_is_short():
    words = {
        page_name(page): sum(bool(re.search(r"\w", word)) for word in page.read_text().split())
        for page in READ_BY_USERS
    }
    assert sum(words.values()) <= MAX_WORDS, words


@pytest.mark.parametrize("page", READ_BY_USERS, ids=page_name)
def test_its_code_fits_the_width_of_a_page(page):
    blocks = re.findall(r"^```.*?^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert [line for block in blocks for line in block.splitlines() if len(line) > MAX_COLUMNS] == []


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_links_to_other_files_of_the_repository_become_paths():
    staging = runpy.run_path(str(DOCS / "stage_pages.py"))
    page = "[a](balance.md), [b](../docs/limits.md#x), ![c](../c.png), [d](../results/d.md#x) ([e](../e.py))"
    shown = staging["LINK"].sub(lambda match: staging["show_path"](DOCS / "index.md", match), page)
    assert shown == page.partition("[d]")[0] + "d (`results/d.md`) (e: `e.py`)"


@pytest.mark.parametrize(("name", "rows"), [("coverage", 7), ("balance", 8)])
def test_its_numbers_are_those_of_the_results(name, rows):
    """Rows that a page shows of a longer report: without standard deviations."""
    report = re.sub(r" ± [\d.]+", "", (ROOT / "results" / name / "README.md").read_text()).splitlines()
    shown = [line for line in (DOCS / f"{name}.md").read_text().splitlines() if line in report]
    assert sum(line.startswith("|") for line in shown) >= rows
