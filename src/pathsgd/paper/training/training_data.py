"""A data set as a run uses it: split, centred, and on the device."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd import PathError
from pathsgd.paper.config import Run
from pathsgd.paper.data.dataset import Dataset


@dataclass(frozen=True)
class TrainingData:
    """What is trained on and what is evaluated on. Inputs are flat."""

    shape: tuple[int, ...]
    classes: int
    train_x: Tensor
    train_y: Tensor
    evaluated_x: Tensor
    evaluated_y: Tensor


def check_enough_points(data: Dataset, run: Run) -> None:
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


def prepare_data(data: Dataset, run: Run, device: torch.device) -> TrainingData:
    check_enough_points(data, run)
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
    tensors = (tensor.to(device) for tensor in (train_x, train_y, evaluated_x, evaluated_y))
    return TrainingData(data.shape, data.classes, *tensors)


class TrainingDataCache:
    """The last two on the device, shared by runs."""

    SIZE = 2

    def __init__(self, datasets: Mapping[str, Dataset], device: torch.device) -> None:
        self.datasets, self.device = datasets, device
        self._found: dict[tuple[object, ...], TrainingData] = {}
        self._lock = threading.Lock()

    def get(self, run: Run) -> TrainingData:
        key = (run.dataset, run.validation, run.seed.split if run.validation else 0, run.centre, run.batch)
        with self._lock:
            if key not in self._found:
                while len(self._found) >= self.SIZE:
                    del self._found[next(iter(self._found))]
                self._found[key] = prepare_data(self.datasets[run.dataset], run, self.device)
            return self._found[key]
