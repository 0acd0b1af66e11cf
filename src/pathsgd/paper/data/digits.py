"""scikit-learn's digits: 1797 images of 8x8 pixels with 17 shades, small enough to try things in seconds.

They come without a split, and in the order of their writers. The fifth, tenth, ... example of each class is
for testing (355), the others for training (1442): both have every writer and every class in proportion, and
no random numbers are involved that a later version might draw differently.
"""

from __future__ import annotations

import torch

from pathsgd.console.optional_imports import import_optional
from pathsgd.paper.data.dataset import Dataset

EVERY = 5


def read_digits() -> Dataset:
    bunch = import_optional("sklearn.datasets", "digits").load_digits()
    x = torch.tensor(bunch.data).to(torch.uint8)
    y = torch.tensor(bunch.target).long()
    nth = torch.nn.functional.one_hot(y).cumsum(0).gather(1, y[:, None])[:, 0]  # of its class, from 1
    held_out = nth % EVERY == 0
    return Dataset(
        "digits", (1, 8, 8), 10, x[~held_out], y[~held_out], x[held_out], y[held_out], highest=16.0
    )
