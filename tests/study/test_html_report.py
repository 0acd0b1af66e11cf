"""The report: everything in one page that needs nothing else."""

import re
from html.parser import HTMLParser

import pytest

from study.claims import Claim, state
from study.report import write_report
from study.tables import Table

TABLES = [Table("Errors & <b>more</b>", ["method", "error"], [["SGD", "1.2%"], ["<i>x</i>", "3%"]], "a < b")]
CLAIMS = [
    Claim(1, "The same curves.", "agrees", [state("here & there", "0 < 1", "<1>", True)], []),
    Claim(2, "<em>hurts</em>", "disagrees", [], []),
    Claim(3, "Faster.", "cannot be told", [], []),
    Claim(4, "Lower.", "not tested", [], ["Ada<b>Grad"]),
]
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Tags, texts and attributes; an error if they do not nest."""

    def __init__(self, content):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def content(everything):
    results, drawn = everything
    path = results.out / "report.html"
    write_report(results, TABLES, CLAIMS, drawn, path)
    return path.read_text(encoding="utf-8")


def test_the_report_holds_everything(content):
    page = Page(content)
    images = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 5
    assert all(source.startswith("data:image/svg+xml;base64,") for source in images)
    badges = [attributes["class"] for tag, attributes in page.tags if "badge" in attributes.get("class", "")]
    assert set(badges) == {
        f"badge {name}" for name in ("agrees", "disagrees", "cannot-be-told", "not-tested")
    }
    for text in (
        "here & there", "0 < 1", "<1>", "Not run: Ada<b>Grad.", "Errors & <b>more</b>", "a < b", "2.13%",
        "epoch 7", "diverged",
        "stopped", "no step size ended well", "the loss was not finite in epoch 4", "CPU & more", "2.x<y>",
        "not known", "0123456789abcdef", "MNIST", "search epochs",
    ):  # fmt: skip
        assert text in page.text, text


def test_the_report_needs_nothing_else(content):
    page = Page(content)
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name in ("src", "href", "data", "srcset", "action"):
            assert attributes.get(name, "#").startswith(("data:image/", "#"))
    assert not re.search(r"https?://|url\(|@import", content)
    targets = {"#" + attributes.get("id", "") for _, attributes in page.tags}
    assert {attributes["href"] for tag, attributes in page.tags if tag == "a"} <= targets


def test_names_are_escaped(content):
    assert "<script" not in content
    assert "&lt;script&gt;alert(1)" in content
    assert "<em>hurts" not in content
    assert "somewhere.npz" not in content  # where the data lay is nobody's business


def test_a_large_svg_is_embedded_as_png(everything, tmp_path, monkeypatch):
    monkeypatch.setattr("study.report.LARGEST_SVG", 1000)
    results, drawn = everything
    write_report(results, [], [], drawn, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert all(a["src"].startswith("data:image/png;base64,") for tag, a in page.tags if tag == "img")
    assert "Claims of the paper" not in page.text
