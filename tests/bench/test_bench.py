"""``pathsgd bench``: that it measures, writes, reads and draws. What it measures is for benchmarks to say."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from pathsgd import cli
from pathsgd.bench import bench_command as command
from pathsgd.bench.measure import Setting
from pathsgd.bench.methods import SWEPT
from pathsgd.console.networks import GPT, ResNet, stack

RESULTS = Path(__file__).parents[2] / "results" / "step_cost"


@pytest.fixture
def small(monkeypatch):
    """The same studies on networks that take no time."""

    def settings(on_gpu, quick, sweep):
        yield Setting("stack", lambda: stack(6, 8, 8, 10), (4, 6))
        if not quick:
            yield Setting(
                "conv", lambda: ResNet(4, (1,), 10), (2, 3, 16, 16), precision="bf16", channels_last=True
            )
            make = functools.partial(GPT, 16, 8, 2, 1, 4)
            yield Setting("GPT", make, (2, 4), tokens=16, methods=("SGD, fused", "PathSGD", "PathAdam"))
        for batch in (1, 4) if sweep else ():
            make, at = (lambda: stack(6, 8, 8, 10)), (batch, 6)
            yield Setting("stack", make, at, study="batch", at=batch, methods=SWEPT)

    monkeypatch.setattr(command, "settings", settings)
    monkeypatch.setattr(command, "bytes_per_us", lambda device: 1e4)


def test_it_measures_writes_and_draws(small, tmp_path, capsys):
    numbers, picture = tmp_path / "cost.json", tmp_path / "cost.png"
    arguments = ["bench", "--device", "cpu", "--seconds", "0.001", "--sweep", "--json", str(numbers)]
    assert cli.main(arguments) == 0
    rows = json.loads(numbers.read_text())["rows"]
    assert {row["net"] for row in rows} == {"stack", "conv", "GPT"}
    assert all(row["train_us"] > row["step_us"] > 0 for row in rows if row["method"] == "SGD, fused")
    assert "PathNormalized(AdamW)" in {row["method"] for row in rows if row["net"] == "conv"}
    for kind in ("SGD, fused", "SGD, momentum, fused", "AdamW, fused"):
        assert {row["ratio"] for row in rows if row["method"] == kind} == {1.0}
    own, kind = (
        next(r for r in rows if (r["net"], r["method"]) == ("conv", name))
        for name in ("PathNormalized(AdamW)", "AdamW, fused")
    )
    assert own["ratio"] == own["train_us"] / kind["train_us"]
    measured = capsys.readouterr().out
    assert "not measured" not in measured
    assert cli.main(["bench", "--read", str(numbers), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith(measured)


def test_some_methods_beside_the_one_all_are_compared_with(small, tmp_path, capsys):
    assert (
        cli.main(["bench", "--device", "cpu", "--quick", "--seconds", "0.001", "--methods", "PathSGD"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert ["PathSGD" in line for line in lines] == [False, True]


def test_some_networks(small, capsys):
    options = ["--device", "cpu", "--seconds", "0.001", "--methods", "PathSGD", "--nets", "GPT"]
    assert cli.main(["bench", *options]) == 0
    assert ["GPT" in line for line in capsys.readouterr().out.splitlines()] == [True, True]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_numbers_are_read_and_drawn(path, tmp_path, capsys):
    assert cli.main(["bench", "--read", str(path), "--plot", str(tmp_path / "cost.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(json.loads(path.read_text())["rows"])
    drawn = (tmp_path / "cost.svg").read_text()
    assert drawn.startswith("<?xml")


def test_errors_are_one_line(small, tmp_path, capsys):
    assert cli.main(["bench", "--read", str(tmp_path / "missing.json")]) == 1
    (tmp_path / "cut.json").write_text('{"rows": [')
    assert cli.main(["bench", "--read", str(tmp_path / "cut.json")]) == 1
    assert (
        cli.main(["bench", "--device", "cpu", "--quick", "--seconds", "0.001", "--json", str(tmp_path)]) == 1
    )
    assert cli.main(["bench", "--methods", "PathSDG"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert "Unknown method: 'PathSDG' (one of SGD, foreach; " in errors[-1]
    assert all(line.startswith("pathsgd: ") for line in errors)


def test_the_settings_of_the_study():
    full = list(command.settings(on_gpu=True, quick=False, sweep=True))
    assert [s.at for s in full if s.study == "batch"] == [1, 4, 16, 64, 256, 1024, 4096]
    assert {s.study for s in full} == {"networks", "batch", "width", "depth"}
    assert [s.net for s in command.settings(on_gpu=False, quick=True, sweep=False)] == ["784-4000-4000-10"]
    x = torch.zeros(2, 1024)
    (deep,) = [s for s in full if s.net == "4 layers of 1024"]
    assert deep.make()(x).shape == (2, 10)
