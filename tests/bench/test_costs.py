"""``benchmarks.step_cost`` and ``library_time``: they measure, write, read and draw."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from benchmarks import library_time, step_cost
from benchmarks.networks import GPT, stack
from benchmarks.step_cost import SWEPT, Setting

RESULTS = Path(__file__).parents[2] / "results" / "step_cost"


def small_settings(on_gpu, sweep):
    yield Setting("stack", lambda: stack(6, 8, 8, 10), (4, 6))
    make = functools.partial(GPT, 16, 8, 2, 1, 4)
    yield Setting("GPT", make, (2, 4), tokens=16, methods=("SGD, fused", "PathSGD"))
    for batch in (1, 4):
        yield Setting("stack", lambda: stack(6, 8, 8, 10), (batch, 6), study="batch", at=batch, methods=SWEPT)


def test_steps_are_timed_beside_torchs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(step_cost, "list_settings", small_settings)
    monkeypatch.setattr(step_cost, "measure_bytes_per_us", lambda device: 1e4)
    numbers = tmp_path / "cost.json"
    methods = ["PathSGD", "Path-SGD by hand", "BalancedMuon"]
    arguments = ["--device", "cpu", "--seconds", "0.001", "--methods", *methods, "--json", str(numbers)]
    step_cost.main(arguments)
    rows = json.loads(numbers.read_text())["rows"]
    assert {row["net"] for row in rows} == {"stack", "GPT"}
    assert {row["method"] for row in rows} == {*methods, "SGD, fused", "Muon"}
    assert {row["ratio"] for row in rows if row["method"] == "SGD, fused"} == {1.0}
    printed = capsys.readouterr().out
    assert "not measured" not in printed
    step_cost.main(["--read", str(numbers), "--plot", str(tmp_path / "cost.png")])
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_numbers_are_read_and_drawn(path, tmp_path, capsys):
    step_cost.main(["--read", str(path), "--plot", str(tmp_path / "cost.svg")])
    assert len(capsys.readouterr().out.splitlines()) == len(json.loads(path.read_text())["rows"])
    assert (tmp_path / "cost.svg").read_text().startswith("<?xml")


def test_calls_of_the_library_are_timed(monkeypatch, capsys):
    monkeypatch.setattr(library_time, "NETWORKS", {"small": (lambda: stack(6, 8, 10), torch.ones(2, 6))})
    monkeypatch.setattr(library_time, "REPEATS", 1)
    library_time.main(["--seconds", "0.001"])
    printed = capsys.readouterr().out
    assert all(f"\n  {call} " in printed for call in ("trace", "balance", "gammas", "path_norm"))
