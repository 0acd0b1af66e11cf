"""A data set as a run sees it: split, scaled, centred, on the device."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.errors import PathError
from pathsgd.paper.config import Run
from pathsgd.paper.data.dataset import Dataset
from pathsgd.paper.experiment.memory import bytes_of


@dataclass(frozen=True)
class Problem:
    """What is trained on and what is evaluated on. Inputs are flat."""

    shape: tuple[int, ...]
    classes: int
    train_x: Tensor
    train_y: Tensor
    evaluated_x: Tensor
    evaluated_y: Tensor


def check_fits(data: Dataset, run: Run) -> None:
    """Whether a run has enough points, found out before any run is begun."""
    left = len(data.train_y) - run.validation
    if left <= 0:
        raise PathError(
            f"{run.dataset} has {len(data.train_y)} training points; {run.validation} cannot be kept out for "
            "validation: --validation"
        )
    if run.batch > left:
        raise PathError(
            f"{run.dataset} has {left} points to train on, less than a batch of {run.batch}: --batch"
        )


def problem_of(data: Dataset, run: Run, device: torch.device) -> Problem:
    check_fits(data, run)
    train_x, train_y = data.train()
    evaluated_x, evaluated_y = data.test()
    if run.validation:
        order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(run.seed.split))
        kept, out = order[run.validation :], order[: run.validation]
        evaluated_x, evaluated_y = train_x[out], train_y[out]
        train_x, train_y = train_x[kept], train_y[kept]
    if run.centre:
        mean = train_x.double().mean(0).float()
        train_x, evaluated_x = train_x - mean, evaluated_x - mean
    return Problem(
        data.shape, data.classes,
        train_x.to(device), train_y.to(device), evaluated_x.to(device), evaluated_y.to(device),
    )  # fmt: skip


class Problems:
    """Problems that several runs share; the last few are kept on the device."""

    KEPT = 2

    def __init__(self, datasets: dict[str, Dataset], device: torch.device) -> None:
        self.datasets, self.device = datasets, device
        self._made: dict[tuple[object, ...], Problem] = {}
        self._lock = threading.Lock()

    def of(self, run: Run) -> Problem:
        key = (run.dataset, run.validation, run.seed.split if run.validation else 0, run.centre, run.batch)
        with self._lock:
            if key not in self._made:
                while len(self._made) >= self.KEPT:
                    del self._made[next(iter(self._made))]
                self._made[key] = problem_of(self.datasets[run.dataset], run, self.device)
            return self._made[key]


def checksum(data: Dataset) -> str:
    """Of all its numbers."""
    digest = hashlib.sha256(repr((data.shape, data.classes)).encode())
    for tensor in (data.train_x, data.train_y, data.test_x, data.test_y):
        for part in bytes_of(tensor):
            digest.update(part)
    return digest.hexdigest()[:16]
