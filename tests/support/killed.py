"""``python killed.py OUT KILLS SEED``: a sweep that is killed (kill -9) again and again, then let be.

The sweeps are forked from a process that has imported torch and traced the network, so that time is spent in
the sweep and not on the way to it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import torch

from pathsgd import cli
from pathsgd.paper.training.initial_network import _trace

SWEEP = [
    "sweep", "--methods", "sgd", "path-momentum", "--inits", "unbalanced", "--dropouts", "0", "0.5",
    "--step-sizes", "0.1", "0.01", "1e-9", "--hidden", "24", "24", "--search-epochs", "6",
    "--validation", "300", "--checkpoint-seconds", "0", "--lanes", "2", "--quiet",
]  # fmt: skip


def start(out: str) -> int:
    child = os.fork()
    if child == 0:
        os._exit(cli.main([*SWEEP, "--out", out]))
    return child


def main(out: str, kills: int, seed: int) -> int:
    torch.set_num_threads(1)
    _trace("mlp", (1, 8, 8), (24, 24), 10)
    chance = random.Random(seed)
    killed = 0
    while killed < kills:
        child = start(out)
        time.sleep(chance.uniform(0.05, 0.8))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            break  # it had come to its end
    _, status = os.waitpid(start(out), 0)
    print(f"killed {killed} times")
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
