"""``python ray_driver.py LOG ARGUMENTS``: the command line, its tasks on Ray slow and watched.

A task writes a line to LOG for every epoch that it trains, so that a test knows which process to kill, and
what was trained twice.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pathsgd import cli
from pathsgd.paper.executors import ray as ray_executor
from pathsgd.paper.executors.ray_worker import train_task
from pathsgd.paper.records.recorder import Epoch


@dataclass(frozen=True)
class Trained:
    pid: int
    run: str
    epoch: int


def watch_tasks(log: Path, pause: float):
    def train_slowly(workplace, run, recorded, checkpoints):
        for event in train_task(workplace, run, recorded, checkpoints):
            if isinstance(event, Epoch):
                with log.open("a") as file:
                    file.write(f"{os.getpid()} {run.name} {event.line['epoch']}\n")
                time.sleep(pause)
            yield event

    return train_slowly


def read_log(log: Path) -> list[Trained]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [Trained(int(pid), run, int(epoch)) for pid, run, epoch in map(str.split, lines)]


if __name__ == "__main__":
    ray_executor.train_task = watch_tasks(Path(sys.argv[1]), pause=0.1)
    sys.exit(cli.main(sys.argv[2:]))
