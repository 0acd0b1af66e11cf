"""The demo tells what its numbers say."""

from pathsgd import Comparison
from pathsgd.uses.comparison import TrainingRun
from study import demo
from study.__main__ import main


def test_the_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(demo, "METHODS", {name: demo.METHODS[name] for name in ("SGD", "BalancedMuon")})
    monkeypatch.setattr("webbrowser.open", lambda url: 1 / 0)  # nothing opens without a terminal
    assert main(["demo", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "differ by 777.2 with SGD, by 0 with Path-SGD" in printed
    assert "Digits, 3 steps" in printed
    assert f"figure: {tmp_path / 'two-starts.png'}" in printed
    assert (tmp_path / "two-starts.png").stat().st_size > 10_000


def test_methods_are_sorted_by_how_far_their_losses_are_apart():
    ends = {"A": (0.1, 0.104), "B": (0.1, 0.106), "C": (0.1, float("inf"))}
    runs = [
        TrainingRun(name, None, rescaled, ((3, ends[name][rescaled]),), 0.0)
        for name in ends
        for rescaled in (False, True)
    ]
    text = demo.describe_training(Comparison("", "", tuple(runs)))
    assert "within 5%: A.\nNot the same: B, C." in text
    assert text.count("inf") == 1
