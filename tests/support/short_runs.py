"""Short runs on digits, killed in the middle where a test asks for it."""

from __future__ import annotations

import torch

from pathsgd.paper.config import Run
from pathsgd.paper.training.run_loop import Checkpoints, train_run

CPU = torch.device("cpu")
SMALL = Run(hidden=(12, 12), epochs=3, step_size=0.1)
EVERY_EPOCH = Checkpoints(seconds=0.0)


class Killed(BaseException):
    """What a test ends a run with: nothing in a run catches it."""


def train_small(config, training_data, folder, kill_at=None, checkpoints=EVERY_EPOCH):
    seen = []

    def watch(run, line):
        seen.append(line)
        if kill_at is not None and line["epoch"] == kill_at:
            raise Killed

    return train_run(config, training_data, folder, watch, checkpoints), seen
