"""A data set as a run sees it: split, scaled, centred, on the device."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.errors import PathError
from pathsgd.paper.data.dataset import Dataset
from pathsgd.paper.experiment.config import Run


@dataclass(frozen=True)
class Problem:
    """What is trained on and what is evaluated on. Inputs are flat."""

    shape: tuple[int, ...]
    classes: int
    train_x: Tensor
    train_y: Tensor
    evaluated_x: Tensor
    evaluated_y: Tensor


def problem_of(data: Dataset, run: Run, device: torch.device) -> Problem:
    train_x, train_y = data.train()
    evaluated_x, evaluated_y = data.test()
    if run.validation:
        if run.validation >= len(train_y):
            raise PathError(
                f"{run.dataset} has {len(train_y)} training points; {run.validation} cannot be kept out for "
                "validation: --validation"
            )
        order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(run.seed.split))
        kept, out = order[run.validation :], order[: run.validation]
        evaluated_x, evaluated_y = train_x[out], train_y[out]
        train_x, train_y = train_x[kept], train_y[kept]
    if run.batch > len(train_y):
        raise PathError(
            f"{run.dataset} has {len(train_y)} points to train on, less than a batch of {run.batch}: --batch"
        )
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
        for part in _bytes(tensor):
            digest.update(part)
    return digest.hexdigest()[:16]


def _bytes(tensor: Tensor) -> Iterator[bytes]:
    # Read from memory: numpy need not be there, and a storage would go through Python byte by byte.
    whole = tensor.contiguous()
    size, start = whole.numel() * whole.element_size(), whole.data_ptr()
    for k in range(0, size, PIECE):
        yield ctypes.string_at(start + k, min(PIECE, size - k))


PIECE = 1 << 24
