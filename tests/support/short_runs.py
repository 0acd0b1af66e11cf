"""Short runs on digits, killed in the middle where a test asks for it."""

import torch

from study.config import Run
from study.run_queue import train_run
from study.runs import RunFolder

CPU = torch.device("cpu")
SMALL = Run(hidden=(12, 12), epochs=3, step_size=0.1)


class Killed(BaseException):
    """What a test ends a run with: nothing in a run catches it."""


def train_small(config, training_data, runs, kill_at=None, checkpoint_seconds=0.0):
    """The record of the run, trained if there is none, and the epochs it reported."""
    seen, folder = [], RunFolder(runs, config)

    def watch(run, line):
        seen.append(line)
        if kill_at is not None and line["epoch"] == kill_at:
            raise Killed

    return folder.find_record() or train_run(config, training_data, folder, watch, checkpoint_seconds), seen
