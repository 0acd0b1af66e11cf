"""A data set in memory: images are kept as bytes, and become floats in [0, 1] when they are used."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd import PathError
from study.files import add_tensor

LARGEST_INPUT = math.sqrt(torch.finfo(torch.float32).max)
TABLE_1 = ("data set", "dimensionality", "classes", "training set", "test set")
"""Column titles of the paper's table of data sets."""


def short_name(dataset: str) -> str:
    """Returns the name in ``name=path.npz``; other data sets keep theirs.

    >>> short_name("mine=data/features.npz"), short_name("mnist")
    ('mine', 'mnist')
    """
    return dataset.partition("=")[0]


@dataclass(frozen=True)
class Dataset:
    """Inputs as rows, and labels; a PathError if shapes, types or labels do not fit each other.

    >>> x = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
    >>> data = Dataset("two", (2,), 2, x, torch.tensor([0, 1]), x[:1], torch.tensor([0]))
    >>> data.features, data.scaled(data.train_x[1:])
    (2, tensor([[0.2000, 0.4000]]))
    """

    name: str
    shape: tuple[int, ...]
    """Shape of one input, channels first: (1, 28, 28), (3, 32, 32), (1, 8, 8), or (features,)."""
    classes: int
    train_x: Tensor
    """(n, features), uint8, or float32 where the file held floats."""
    train_y: Tensor
    """(n,) int64, from 0 to classes - 1."""
    test_x: Tensor
    test_y: Tensor
    highest: float = 255.0
    """The stored value that ``scaled`` turns into 1: 255 for images, 16 for digits, 1 for floats."""

    def __post_init__(self) -> None:
        for split, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if x.shape != (len(y), self.features) or y.ndim != 1 or y.dtype != torch.int64 or not len(y):
                shapes = f"inputs {tuple(x.shape)} and labels {tuple(y.shape)} of {y.dtype}"
                expected = f"(n, {self.features}) and (n,) of torch.int64 with n > 0"
                raise PathError(f"{self.name}: {split} has {shapes}: expected {expected}")
            if x.dtype not in (torch.uint8, torch.float32):
                raise PathError(f"{self.name}: {split} inputs are {x.dtype}: expected uint8 or float32")
            if int(y.min()) < 0 or int(y.max()) >= self.classes:
                raise PathError(f"{self.name}: {split} has labels outside of 0 to {self.classes - 1}")

    @property
    def features(self) -> int:
        return math.prod(self.shape)

    @property
    def checksum(self) -> str:
        """Checksum of all its numbers."""
        digest = hashlib.sha256(repr((self.shape, self.classes)).encode())
        for tensor in (self.train_x, self.train_y, self.test_x, self.test_y):
            add_tensor(digest, tensor)
        return digest.hexdigest()[:16]

    def scaled(self, x: Tensor) -> Tensor:
        """Rows of train_x or test_x as float32 (n, features), in [0, 1] unless the file held floats."""
        return x.flatten(1).to(torch.float32) / self.highest

    def check_learnable(self) -> None:
        """Refuses data that no network can learn from."""
        labels = self.train_y.unique()
        if len(labels) < 2:
            raise PathError(f"{self.name} has one class in its training labels: expected two or more")
        unknown = sorted(set(self.test_y.unique().tolist()) - set(labels.tolist()))
        if unknown:
            names = ", ".join(map(str, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            raise PathError(f"{self.name} has test labels that no training example has: {names}")
        largest = max(float(x.abs().max()) for x in (self.train_x.float(), self.test_x.float()))
        if largest > LARGEST_INPUT:
            wrong = f"inputs as large as {largest:.2g}, whose squares overflow float32"
            raise PathError(f"{self.name} has {wrong}: scale them down")


def dimensionality(shape: tuple[int, ...]) -> str:
    """Formats a shape as the paper's table does.

    >>> dimensionality((3, 32, 32)), dimensionality((1, 28, 28)), dimensionality((90,))
    ('3072 (32x32 colour)', '784 (28x28 grey)', '90')
    """
    features = math.prod(shape)
    if len(shape) != 3:
        return str(features)
    channels, height, width = shape
    kind = {1: "grey", 3: "colour"}.get(channels, f"{channels} channels")
    return f"{features} ({height}x{width} {kind})"
