"""results/uses/README.md shows the records: each line of each table that ``benchmarks/uses`` prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.uses import averages, folding, inspection, lora, pruning, quantisation
from benchmarks.uses.rows import read_rows

PAGE = Path(__file__).parents[2] / "results" / "uses" / "README.md"


def print_lora(rows):
    task = replace(lora.read_headers(), data_hash=rows[0]["data"])  # of another torch they differ
    lora.print_tables(lora.Study(pytest.fail, task, rows, pytest.fail))  # nothing is left to run


PRINTERS = {
    "averages": averages.tabulate,
    "folding": folding.tabulate,
    "inspection": inspection.print_rows,
    "lora": print_lora,
    "pruning": pruning.print_rows,
    "quantisation": quantisation.print_rows,
}


@pytest.mark.parametrize("name", PRINTERS)
def test_the_page_shows_the_records(name, capsys):
    PRINTERS[name](read_rows(name))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = PAGE.read_text().splitlines()
    assert len(lines) > 4
    assert set(lines) <= set(page)


@pytest.mark.parametrize(
    "module", [averages, folding, pruning, quantisation], ids=lambda module: module.__name__
)
def test_the_records_can_be_drawn(module, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIGURES", tmp_path)
    name = module.__name__.rpartition(".")[2]
    module.draw(read_rows(name))
    assert (tmp_path / f"uses-{name}.png").stat().st_size > 5_000
