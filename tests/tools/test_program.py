"""The program itself: its commands, how it starts and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pathsgd_entry_point

SRC = Path(pathsgd_entry_point.__file__).parent


def run_python(program, *arguments, **variables):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **variables},
    )  # fmt: skip


def test_the_command_prints_its_options_and_an_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        pathsgd_entry_point.main(["inspect", "--help"])
    printed = capsys.readouterr().out
    assert "usage: pathsgd inspect " in printed
    assert "\n  pathsgd inspect" in printed
    assert all(len(line) <= 120 for line in printed.splitlines())


def test_the_commands_are_listed_without_torch():
    program = """
import sys, pathsgd_entry_point
sys.argv = ["pathsgd", *sys.argv[1:]]
code = pathsgd_entry_point.main()
assert "torch" not in sys.modules
sys.exit(code)
"""
    listed = run_python(program, "--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert re.findall(r"^  ([a-z]+) ", listed.stdout, re.MULTILINE) == ["inspect", "compare"]
    assert run_python(program, "--version").stdout.startswith("pathsgd 0.")
    nothing = run_python(program)
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (2, "", listed.stdout)
    wrong = run_python(program, "trian")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("pathsgd: unknown command 'trian' (one of inspect, compare)")
    assert wrong.stderr.count("\n") == 1


def test_an_interrupted_import_of_torch_prints_nothing(tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "pathsgd_entry_point", "inspect"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SRC)])},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed, errors) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["inspect"], "TARGET"),
        (["inspect", "models:mlp", "--p", "two"], "--p"),
        (["inspect", "models:mlp", "--arguments", "{width: 3}"], "is no JSON"),
        (["inspect", "models:mlp", "--input-shape", "1,x"], "as in 1,3,32,32, not '1,x'"),
        (["inspect", "models:mlp", "--input-dtype", "nn"], "another dtype of torch, not 'nn'"),
        (["inspect", "models:mlp", "--batch-dim", "x"], "--batch-dim"),
    ],
)
def test_a_wrong_option_is_named(arguments, part, capsys):
    with pytest.raises(SystemExit, match="2"):
        pathsgd_entry_point.main(arguments)
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "/some/file"), 1, "/some/file: No space left on device"),
    ],
)
def test_errors_end_in_an_exit_code_and_a_line(monkeypatch, capsys, error, code, line):
    def fail(arguments):
        raise error

    monkeypatch.setattr("pathsgd.cli.inspect.main", fail)
    assert pathsgd_entry_point.main(["inspect"]) == code
    assert capsys.readouterr().err == f"pathsgd: {line}\n"
