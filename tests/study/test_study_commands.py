"""The commands as a user meets them: whole studies, interruptions, and errors of one line."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from study import commands
from study.__main__ import COMMANDS, main
from study.files import lock_folder
from study.training import Trainer

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
TINY = ["--hidden", "24", "24", "--search-epochs", "4", "--epochs", "5", "--validation", "300", "--quiet"]
SOME = ["--methods", "sgd", "path-sgd", "--dropouts", "0", "--step-sizes", "1", "0.1", "--repeats", "1"]


def command(*arguments):
    return main([str(argument) for argument in arguments])


def files(folder, *patterns):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for pattern in patterns
        for path in sorted(folder.rglob(pattern))
    }


def numbers(out):
    """Everything that has to be the same after an interruption."""
    return files(out, "metrics.jsonl", "config.json", "choices.json")


def run_program(program, *arguments):
    """In a Python of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / program), *map(str, arguments)], capture_output=True, text=True,
        timeout=300, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    assert command("reproduce", *TINY, *SOME, "--out", out) == 0
    return out


def test_the_study(study, capsys):
    judged = {claim["number"]: claim for claim in json.loads((study / "claims.json").read_text())}
    assert sorted(judged) == [1, 2, 3, 4, 5, 6, 7]
    assert judged[1]["verdict"] == "cannot be told"  # one seed has no interval
    assert [c["measured"] for c in judged[1]["comparisons"][1::2]] == ["equal bit for bit"]
    assert judged[3]["verdict"] == judged[5]["verdict"] == "not tested"  # without AdaGrad and dropout
    assert (study / "report.html").stat().st_size > 50_000
    (manifest,) = json.loads((study / "manifest.json").read_text())
    assert set(manifest) >= {"revision", "python", "packages", "device"}
    # The same pictures from the numbers alone.
    before = files(study, "*.jsonl", "*.svg", "*.png", "report.html")
    capsys.readouterr()
    assert command("figures", study) == 0
    printed = capsys.readouterr().out
    assert before == files(study, "*.jsonl", "*.svg", "*.png", "report.html")
    assert "1. CANNOT BE TOLD (1 of 2): Path-SGD gives the same curves" in printed
    assert f"report:  {study / 'report.html'}" in printed


def test_a_study_is_trained_once(study, tmp_path, capsys, no_figures):
    shutil.copytree(study, tmp_path, dirs_exist_ok=True)
    assert command("reproduce", *(a for a in TINY if a != "--quiet"), *SOME, "--out", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "final runs: 5 of 5 done before" in printed
    assert "epochs at most" not in printed
    assert numbers(tmp_path) == numbers(study)


def test_lanes_change_nothing_where_networks_differ(tmp_path):
    """A trace changes how torch rounds as long as it takes: none may be made beside a run."""
    own = []
    for features in (30, 50):
        rng = np.random.default_rng(features)
        y = rng.integers(0, 10, 900)
        x = rng.normal(size=(10, features))[y] + 1.5 * rng.normal(size=(900, features))
        own.append(tmp_path / f"of{features}.npz")
        np.savez(own[-1], train_x=x[:700], train_y=y[:700], test_x=x[700:], test_y=y[700:])
    names = [f"{path.stem}={path}" for path in own]
    sweep = ["sweep", "--quiet", "--datasets", *names,
             "--methods", "sgd", "path-sgd", "--inits", "balanced", "--dropouts", "0", "--step-sizes", "0.1",
             "0.01", "--search-epochs", "2", "--validation", "200", "--hidden", "64", "64", "--batch", "20",
             ]  # fmt: skip
    run_program("with_lanes.py", tmp_path, *sweep)
    assert len(numbers(tmp_path / "1")) > 12
    assert numbers(tmp_path / "1") == numbers(tmp_path / "4")


def test_a_sweep_killed_again_and_again_ends_with_the_same_bits(tmp_path):
    assert "killed 3 times" in run_program("killed.py", tmp_path, 3, 0)
    whole = numbers(tmp_path / "whole")
    assert len([name for name in whole if name.endswith("metrics.jsonl")]) == 16  # 4 beyond the largest
    assert numbers(tmp_path / "killed") == whole
    assert not files(tmp_path / "killed", ".*.tmp")


def test_one_run(tmp_path, capsys):
    arguments = ("train", "--hidden", 16, "--epochs", 2, "--step-size", 0.1, "--out", tmp_path)
    assert command(*arguments) == 0
    assert '{"epoch": 2, "train_loss": ' in capsys.readouterr().out
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in folder.iterdir()} == {
        "checkpoint.pt", "config.json", "metrics.jsonl", "result.json",
    }  # fmt: skip
    config = ("train", "--config", folder / "config.json", "--out", tmp_path)
    assert command(*config) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert command(*config, "--seed-order", 1) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_data_set_of_ones_own(tmp_path, capsys, no_figures):
    rng = np.random.default_rng(0)
    y = np.arange(200) % 3
    x = rng.normal(size=(200, 5)) + y[:, None]
    own = tmp_path / "own.npz"
    np.savez(own, train_x=x[:150], train_y=y[:150], test_x=x[150:], test_y=y[150:])
    out = tmp_path / "out"
    study = ("reproduce", *SOME, "--dataset", f"own={own}", "--hidden", 8, "--validation", 30, "--batch", 20)
    assert command(*study, "--search-epochs", 2, "--epochs", 3, "--out", out, "--quiet") == 0
    assert "own       5               3        150           50" in capsys.readouterr().out
    before = numbers(out)
    longer = (*study, "--search-epochs", 2, "--epochs", 4, "--out", out)
    assert "holds another study (epochs differ)" in refused(capsys, *longer)
    np.savez(own, train_x=2 * x[:150], train_y=y[:150], test_x=x[150:], test_y=y[150:])
    again = (*study, "--search-epochs", 2, "--epochs", 3, "--out", out, "--quiet")
    (out / ".study.json.tmp").write_bytes(b"")  # by a kill in the middle of writing
    assert "holds another study (data of own differ)" in refused(capsys, *again)
    assert numbers(out) == before
    (out / "figures").mkdir()
    (out / "figures" / "figure3.png").write_bytes(b"old")
    assert command(*again, "--replace") == 0
    assert len(numbers(out)) > len(before)  # other numbers are other runs
    assert not (out / "figures" / "figure3.png").exists()
    assert not files(out, ".*.tmp")


def refused(capsys, *arguments, code=1):
    """The one line an error comes to."""
    capsys.readouterr()
    assert command(*arguments) == code
    printed = capsys.readouterr().err
    assert printed.startswith("study: ")
    assert printed.count("\n") == 1
    return printed


def test_errors_of_one_line(tmp_path, capsys, study):
    taken = tmp_path / "taken"
    taken.write_text("a file")
    assert "Unknown method: 'sdg'" in refused(
        capsys, "reproduce", "--methods", "sdg", "--out", tmp_path / "a"
    )
    assert "no data set is called 'minst'" in refused(capsys, "train", "--dataset", "minst")
    for folder in (taken, taken / "x"):
        assert "is not a folder" in refused(capsys, "train", "--hidden", 4, "--out", folder)
    assert "cannot be used" in refused(capsys, "train", "--device", "cuda:77", "--out", tmp_path / "a")
    assert "cannot be used" in refused(capsys, "train", "--device", "toaster", "--out", tmp_path / "a")
    assert "Invalid step size" in refused(capsys, "train", "--step-size", "-1", "--out", tmp_path / "a")
    for wrong in (["--dropouts", 0, "nan"], ["--seed", 1 << 70], ["--p", "inf"], ["--validation", 1440]):
        assert refused(capsys, "sweep", *wrong, "--out", tmp_path / "b")
    assert not (tmp_path / "b" / "study.json").exists()  # so the folder is free for the right command
    assert "each needs a name of its own" in refused(capsys, "sweep", "--dataset", "a=1.npz", "a=2.npz")
    assert "out of memory" in refused(capsys, "train", "--hidden", 10**11, "--out", tmp_path / "b")
    assert "each once" in refused(capsys, "sweep", "--methods", "sgd", "sgd", "--out", tmp_path / "a")
    assert "holds no study" in refused(capsys, "figures", tmp_path / "nowhere")
    assert "is not JSON" in refused(capsys, "train", "--config", taken, "--out", tmp_path / "a")
    assert "is not there" in refused(capsys, "train", "--config", tmp_path / "gone", "--out", tmp_path / "a")
    wrong = tmp_path / "wrong.json"
    for text, message in (
        ('{"epoch": 3}', "unknown field 'epoch'"),
        ('{"epochs": "3"}', "epochs: expected int, found '3'"),
        ('{"hidden": 3}', "hidden: expected a list, found 3"),
        ('{"init": "odd"}', "init: expected one of balanced, unbalanced, powers-of-two, found 'odd'"),
        ('{"seed": 3}', "expected an object with the fields of Seeds"),
        ("[]", "expected an object with the fields of Run"),
    ):
        wrong.write_text(text)
        assert message in refused(capsys, "train", "--config", wrong, "--out", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_study_that_was_changed_by_hand_is_refused(study, tmp_path, capsys, no_figures):
    for name, content in files(study, "*.json", "*.jsonl").items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert command("figures", tmp_path) == 0
    changed = next(p for p in tmp_path.rglob("metrics.jsonl") if "-test-" in p.parent.name)
    content = changed.read_bytes()
    changed.write_bytes(content[:-20])
    assert "was changed after the run had ended" in refused(capsys, "figures", tmp_path)
    changed.write_bytes(content)
    (changed.parent / "result.json").unlink()
    assert "has runs to go" in refused(capsys, "figures", tmp_path)
    data = (tmp_path / "data.json").read_text()
    for text in ("[]", '{"digits": {}}'):
        (tmp_path / "data.json").write_text(text)
        assert "data.json" in refused(capsys, "figures", tmp_path)
    (tmp_path / "data.json").write_text(data)
    (tmp_path / "choices.json").write_text('[{"cell": 3}]')
    assert "choices.json" in refused(capsys, "figures", tmp_path)
    (tmp_path / "choices.json").unlink()
    assert "choices.json is not there" in refused(capsys, "figures", tmp_path)


def test_an_explosion_is_recorded_and_told(tmp_path, capsys):
    arguments = ("train", "--method", "sgd", "--step-size", 1e30, "--hidden", 8, "--out", tmp_path, "--quiet")
    assert command(*arguments) == 1
    assert "diverged: the loss was not finite in epoch" in capsys.readouterr().out
    sweep = ("sweep", *TINY, "--methods", "sgd", "--step-sizes", 1e30, "--inits", "balanced", "--dropouts", 0)
    assert command(*sweep, "--out", tmp_path / "sweep") == 1
    assert "diverged" in capsys.readouterr().out


def test_a_second_process_is_refused(tmp_path, capsys):
    with lock_folder(tmp_path):
        assert "another process is at work" in refused(capsys, "train", "--hidden", 4, "--out", tmp_path)


def test_a_full_disk(tmp_path, capsys):
    """A limit on the size of files stands for it: writes fail in the middle, as they do there."""
    arguments = ("train", "--hidden", 64, 64, "--epochs", 2, "--out", tmp_path, "--quiet")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        code = command(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (folder,) = (tmp_path / "runs").iterdir()
    said = f"study: {folder / 'checkpoint.pt'}: File too large\n"
    assert (code, capsys.readouterr().err) == (1, said)
    assert not (folder / "result.json").exists()
    assert {path.name for path in folder.iterdir()} == {"config.json", "metrics.jsonl"}
    assert command(*arguments) == 0


def test_lr_is_the_step_size_and_the_defaults_are_those_of_the_preset(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command("train", "--hidden", 8, "--epochs", 2, "--lr", 0.3, "--seed-order", 3) == 0
    (folder,) = Path("pathsgd-train/runs").iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert (config["step_size"], config["seed"]["order"], config["hidden"]) == (0.3, 3, [8])
    for arguments, shown in (
        (["sweep"], "(default: 256 256)"),
        (["sweep", "--preset", "paper"], "cifar100 svhn"),
    ):
        with pytest.raises(SystemExit):
            command(*arguments, "--help")
        assert shown in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Unknown preset: 'huge' (one of small, paper)" in refused(capsys, "sweep", "--preset", "huge")


def test_an_interrupted_run_says_that_it_can_be_resumed(tmp_path, monkeypatch, capsys):
    options = ("train", "--hidden", 8, "--epochs", 3, "--checkpoint-seconds", 0)
    assert command(*options, "--out", tmp_path / "whole") == 0
    train_epoch, done = Trainer.train_epoch, []

    def interrupted(trainer):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return train_epoch(trainer)

    monkeypatch.setattr(Trainer, "train_epoch", interrupted)
    assert "the same command resumes" in refused(capsys, *options, "--out", tmp_path / "parts", code=130)
    monkeypatch.setattr(Trainer, "train_epoch", train_epoch)
    assert command(*options, "--out", tmp_path / "parts") == 0
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_options_and_an_example(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        command(name, "--help")
    printed = capsys.readouterr().out
    assert f"usage: python -m study {name} " in printed
    assert f"\n  python -m study {name}" in printed


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "--hiden", "3"], "--hidden"),
        (["train", "--epochs", "many"], "--epochs"),
        (["train", "--init", "odd"], "powers-of-two"),
        (["sweep", "--preset"], "--preset"),
    ],
)
def test_a_wrong_option_is_named(arguments, part, capsys):
    with pytest.raises(SystemExit, match="2"):
        command(*arguments)
    assert part in capsys.readouterr().err


def run_python(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False,
        cwd=ROOT,
    )  # fmt: skip


def test_the_commands_are_listed_without_torch():
    program = """
import sys
from study.__main__ import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""
    listed = run_python(program, "--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert re.findall(r"^  ([a-z]+) ", listed.stdout, re.MULTILINE) == list(COMMANDS)
    nothing, wrong = run_python(program), run_python(program, "trian")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (2, "", listed.stdout)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert wrong.stderr.startswith("study: unknown command 'trian' (one of demo, ")


def test_what_is_not_installed_is_named_before_anything_is_trained():
    program = """
import sys
from study.__main__ import main
sys.modules["matplotlib"] = None
sys.exit(main(["reproduce", "--out", "never"]))
"""
    done = run_python(program)
    assert (done.returncode, done.stderr) == (
        1,
        "study: the study needs matplotlib: pip install -e '.[study]'\n",
    )
    assert not (ROOT / "never").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA error: out of memory"), "study: out of memory: CUDA error"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "study: out of memory: CUDA"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
    ],
)
def test_a_full_memory_is_one_line(monkeypatch, capsys, error, said):
    def fail(arguments):
        raise error

    monkeypatch.setitem(commands.MAIN, "train", fail)
    if said is None:
        with pytest.raises(RuntimeError, match="illegal"):
            command("train")
    else:
        assert said in refused(capsys, "train")
