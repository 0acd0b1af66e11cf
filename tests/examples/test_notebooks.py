"""The notebooks run, and were committed as they had run."""

import json
from pathlib import Path

import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def read_cells(notebook):
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook):
    threads = torch.get_num_threads()
    names = {"__name__": "notebook"}
    try:
        for cell in read_cells(notebook):
            exec(compile(source(cell), notebook.name, "exec"), names)
    finally:
        torch.set_num_threads(threads)
    comparison = names["comparison"]
    least = min(comparison.find(method).loss for method in comparison.methods)
    assert comparison.find("BalancedMuon").loss < 1.2 * least
    comparison.draw()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_shown_as_it_ran(notebook):
    cells = read_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
