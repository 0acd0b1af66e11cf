"""The program itself: its commands, how it starts and how it ends."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pathsgd_entry_point
from pathsgd import cli

SRC = Path(pathsgd_entry_point.__file__).parent


def run_python(program, *arguments, **variables):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **variables},
    )  # fmt: skip


@pytest.mark.parametrize("name", pathsgd_entry_point.COMMANDS)
def test_every_command_prints_its_options_and_an_example(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    printed = capsys.readouterr().out
    assert f"usage: pathsgd {name} " in printed
    assert f"\n  pathsgd {name}" in printed
    assert all(len(line) <= 120 for line in printed.splitlines())
    module, _ = pathsgd_entry_point.COMMANDS[name]
    assert callable(importlib.import_module(module).main)


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
    assert re.findall(r"^  ([a-z]+) ", listed.stdout, re.MULTILINE) == list(pathsgd_entry_point.COMMANDS)
    assert run_python(program, "--version").stdout.startswith("pathsgd 0.")
    nothing = run_python(program)
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (2, "", listed.stdout)
    wrong = run_python(program, "trian")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("pathsgd: unknown command 'trian' (one of inspect, ")
    assert wrong.stderr.count("\n") == 1


@pytest.mark.parametrize("name", pathsgd_entry_point.STUDY_COMMANDS)
def test_a_command_of_the_study_is_answered_with_where_it_is(name, capsys):
    assert cli.main([name]) == 2
    assert capsys.readouterr().err == f"pathsgd: the study is run from a clone, by `python -m study {name}`\n"


def test_without_tyro_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "pathsgd.console.command_line", raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["bench"]) == 1
    assert capsys.readouterr().err == "pathsgd: the command line needs tyro: pip install 'pathsgd[cli]'\n"


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


def test_a_wrong_option_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["inspect"])
    assert "TARGET" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "/some/file"), 1, "/some/file: No space left on device"),
        (OSError("one\ntwo"), 1, "one two"),
    ],
)
def test_errors_end_in_an_exit_code_and_a_line(monkeypatch, capsys, error, code, line):
    def fail(arguments):
        raise error

    monkeypatch.setattr("pathsgd.bench.bench_command.main", fail)
    assert cli.main(["bench"]) == code
    assert capsys.readouterr().err == f"pathsgd: {line}\n"
