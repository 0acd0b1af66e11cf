"""``pathsgd train`` and ``pathsgd sweep``: names of options, JSON, networks and data of one's own."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch

from pathsgd import cli

NETS = """
import torch
from torch import nn

print("printed by the user's module")


def make(features, classes):
    return nn.Sequential(nn.Linear(features, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2),
                         nn.Linear(12, classes))


class Residual(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(features, 8), nn.Linear(8, 8), nn.Linear(8, classes)

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.c(h + torch.relu(self.b(h)))


def no_arguments():
    return nn.Linear(64, 10)


def wrong_outputs(features, classes):
    return nn.Linear(features, classes + 1)


def wrong_inputs(features, classes):
    return nn.Linear(features + 1, classes)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    yield tmp_path
    sys.modules.pop("nets", None)


def run_json(capsys, *arguments, code=0):
    capsys.readouterr()
    assert cli.main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def error_line(capsys, *arguments):
    """The one line of a command that fails."""
    capsys.readouterr()
    assert cli.main([*map(str, arguments)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "printed by the user" not in line]
    assert line.startswith("pathsgd: ")
    return line


SMALL = ("train", "--hidden", 8, "--epochs", 2)


def test_lr_is_the_step_size_and_json_has_the_run(folder, capsys):
    found = run_json(capsys, *SMALL, "--lr", 0.1, "--seed-order", 3)
    assert (found["run"]["step_size"], found["run"]["seed"]["order"]) == (0.1, 3)
    assert (found["status"], found["reason"]) == ("done", "")
    assert [line["epoch"] for line in found["epochs"]] == [0, 1, 2]
    assert (folder / found["folder"] / "result.json").exists()
    assert run_json(capsys, *SMALL, "--step-size", 0.1, "--seed-order", 3) == found
    diverged = run_json(capsys, *SMALL, "--method", "sgd", "--lr", 1e30, code=1)
    assert diverged["status"] == "diverged"
    assert diverged["epochs"][-1]["train_loss"] is None


def test_a_sweep_in_json(folder, capsys):
    options = ("--hidden", 8, "--search-epochs", 2, "--inits", "balanced", "--dropout", 0)
    found = run_json(capsys, "sweep", *options, "--method", "sgd", "path-sgd", "--lr", 0.1, 0.01)
    assert found["out"] == "pathsgd-sweep"
    assert [choice["cell"]["method"] for choice in found["choices"]] == ["sgd", "path-sgd"]
    assert {trial["step_size"] for trial in found["choices"][0]["tried"]} == {0.1, 0.01}
    assert found["choices"] == json.loads((folder / "pathsgd-sweep" / "choices.json").read_text())


def test_the_defaults_are_those_of_the_preset_or_the_configuration(folder, capsys):
    for arguments, shown in (
        (["sweep", "--help"], "(default: 256 256)"),
        (["sweep", "--preset", "paper", "--help"], "mnist cifar10 cifar100 svhn"),
    ):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert shown in " ".join(capsys.readouterr().out.replace("│", " ").split())
    found = run_json(capsys, *SMALL, "--lr", 0.3)
    config = folder / found["folder"] / "config.json"
    longer = run_json(capsys, "train", "--config", config, "--epochs", 3)
    assert (longer["run"]["hidden"], longer["run"]["step_size"], longer["run"]["epochs"]) == ([8], 0.3, 3)


@pytest.mark.parametrize("net", ["nets:make", "nets.py:Residual"])
@pytest.mark.parametrize("method", ["path-sgd", "adam"])
def test_a_network_of_ones_own(folder, capsys, net, method):
    options = ("train", "--net", net, "--method", method, "--lr", 0.01, "--epochs", 3)
    found = run_json(capsys, *options, "--out", "whole")
    assert found["status"] == "done"
    losses = [line["train_loss"] for line in found["epochs"]]
    assert losses[-1] < losses[1]
    # Resumed after every epoch it ends with the same numbers: weights, order and dropout are seeded.
    for epochs in (1, 2):
        saved = run_json(capsys, *options[:-1], epochs, "--out", f"of{epochs}")
        assert saved["epochs"] == found["epochs"][: epochs + 1]
    unbalanced = run_json(capsys, *options, "--init", "unbalanced", "--out", "whole")
    gap = abs(unbalanced["epochs"][0]["test_loss"] - found["epochs"][0]["test_loss"])
    assert gap < 1e-4, "rescaling does not change the function"


def test_a_network_of_ones_own_is_resumed_with_the_same_numbers(folder, capsys, monkeypatch):
    options = ("train", "--net", "nets:make", "--lr", 0.01, "--epochs", 3, "--checkpoint-seconds", 0)
    whole = run_json(capsys, *options, "--out", "whole")

    from pathsgd.paper.training.trainer import Trainer

    train_epoch, done = Trainer.train_epoch, []

    def interrupted(trainer):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return train_epoch(trainer)

    monkeypatch.setattr(Trainer, "train_epoch", interrupted)
    assert cli.main([*map(str, options), "--out", "parts"]) == 130
    assert "the same command resumes" in capsys.readouterr().err
    monkeypatch.setattr(Trainer, "train_epoch", train_epoch)
    torch.manual_seed(12345)
    parts = run_json(capsys, *options, "--out", "parts")
    assert parts["epochs"] == whole["epochs"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--net", "nets:gone"], ["there is no 'gone' in nets"]),
        (["--net", "gone:make"], ["there is no module 'gone'"]),
        (["--net", "nets:no_arguments"], ["nets:no_arguments raised TypeError", "2 were given"]),
        (["--net", "nets:wrong_outputs"], ["outputs of shape (2, 11), expected (2, 10)"]),
        (["--net", "nets:wrong_inputs"], ["on inputs of shape (2, 64) raised RuntimeError"]),
        (["--net", "nets:make", "--dropout", 0.5], ["brings its own"]),
        (["--net", "lstm"], ["Invalid net: 'lstm' (mlp, conv or package.module:function)"]),
        (["--method", "sdg"], ["Unknown method: 'sdg'"]),
        (["--dataset", "minst"], ["no data set is called 'minst'"]),
        (["--device", "abacus"], ["device 'abacus' cannot be used"]),
        (["--out", "nets.py"], ["nets.py is not a folder"]),
        (["--config", "gone.json"], ["gone.json"]),
    ],
)
def test_what_is_wrong_is_one_line(folder, capsys, arguments, parts):
    line = error_line(capsys, *SMALL, *arguments)
    for part in parts:
        assert part in line
    assert not (folder / "pathsgd-train").exists()


def test_a_study_checks_for_matplotlib_before_it_trains(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "needs matplotlib: pip install 'pathsgd[paper]'" in error_line(
        capsys, "reproduce", "--out", "study"
    )
    assert not (folder / "study").exists()


def test_an_unknown_preset_and_a_study_of_ones_own_network(folder, capsys):
    assert "Unknown preset: 'huge' (one of small, paper)" in error_line(capsys, "sweep", "--preset", "huge")
    assert "only single runs" in error_line(capsys, "sweep", "--net", "nets:make")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"train_y": np.zeros(150, dtype=int), "test_y": np.zeros(50, dtype=int)}, ["one class"]),
        ({"test_y": np.arange(50) % 5}, ["test", "label"]),
        ({"train_x": np.full((150, 5), 1e30)}, ["1e+30"]),
        ({"test_x": np.full((50, 5), 1e30)}, ["1e+30"]),
        ({"train_x": np.full((150, 5), math.nan)}, ["not finite"]),
    ],
)
def test_data_that_cannot_be_learned_from_is_one_line(folder, capsys, changes, parts):
    rng = np.random.default_rng(0)
    y = np.arange(200) % 3
    x = rng.normal(size=(200, 5)) + y[:, None]
    arrays = {"train_x": x[:150], "train_y": y[:150], "test_x": x[150:], "test_y": y[150:]}
    np.savez("own.npz", **{**arrays, **changes})
    line = error_line(capsys, *SMALL, "--batch", 20, "--dataset", "own=own.npz")
    assert "own" in line
    for part in parts:
        assert part in line
