"""``python killed.py FOLDER KILLS SEED``: a sweep into FOLDER/whole, and one into FOLDER/killed that is
killed (kill -9) again and again, then let be.

The sweeps are forked from a process that has imported all they need and traced the network, so that time is
spent in the sweep and not on the way to it.
"""

import importlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from study.__main__ import main as study
from study.sources import load
from study.training import trace_network

SWEEP = [
    "sweep", "--methods", "sgd", "path-momentum", "--inits", "unbalanced", "--dropouts", "0.5", "0",
    "--step-sizes", "0.1", "0.01", "1e-9", "--hidden", "24", "24", "--search-epochs", "6",
    "--validation", "300", "--checkpoint-seconds", "0", "--lanes", "2", "--quiet",
]  # fmt: skip


def start(out: Path) -> int:
    child = os.fork()
    if child == 0:
        os._exit(study([*SWEEP, "--out", str(out)]))
    return child


def finish(out: Path) -> None:
    _, status = os.waitpid(start(out), 0)
    assert os.waitstatus_to_exitcode(status) == 0


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    importlib.import_module("study.commands")
    load("digits")  # imports scikit-learn
    trace_network(64, 24, 24, 10)
    begun = time.monotonic()
    finish(folder / "whole")
    whole = time.monotonic() - begun
    chance = random.Random(seed)
    killed = 0
    while killed < kills:
        child = start(folder / "killed")
        time.sleep(chance.uniform(0.02, 0.13) * whole)  # six times this come to no end
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            break  # it had come to its end
    finish(folder / "killed")
    print(f"killed {killed} times")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
