"""Small files in the data sets' original formats, and what their loading comes to."""

import gzip
import struct

import numpy as np
import pytest
import scipy.io
import torch

from pathsgd import PathError
from study.data import Dataset
from study.sources import load

RNG = np.random.default_rng(0)


def pixels(n, *shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def idx(array):
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def refused(name, data_dir, *parts, **options):
    """The one line that a data set is refused with, which has to hold all these parts."""
    with pytest.raises(PathError) as caught:
        load(name, data_dir, **{"download": False, **options})
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message
    return message


def left_over(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def write_mnist(tmp_path):
    """7 + 3 images in MNIST/raw, and what is in them."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    arrays = {"train": (pixels(7, 28, 28), pixels(7) % 10), "t10k": (pixels(3, 28, 28), pixels(3) % 10)}
    for split, (x, y) in arrays.items():
        (raw / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x)))
        (raw / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(y)))
    return raw, arrays


def write_cifar(folder, files, classes):
    """5 records in each file; gives back the last of its label bytes and the pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name in files:
        labels = np.stack([pixels(5) % count for count in classes], axis=1)
        x = pixels(5, 3072)
        (folder / name).write_bytes(np.concatenate([labels, x], axis=1).tobytes())
        written[name] = (x, labels[:, -1])
    return written


def write_svhn(folder, n=6, compress=True, **changed):
    folder.mkdir(exist_ok=True)
    written = {}
    for split in ("train", "test"):
        x, y = pixels(32, 32, 3, n), np.arange(1, n + 1, dtype=np.uint8)[:, None] + (10 - n)
        arrays = {"X": x, "y": y, **changed}
        scipy.io.savemat(folder / f"{split}_32x32.mat", arrays, do_compression=compress)
        written[split] = (x, y)
    return written


def clouds(count=250, features=5, classes=3):
    """Points around one centre for each class, as floats; 50 of them for testing."""
    y = torch.arange(count) % classes
    x = torch.randn(count, features, generator=torch.Generator().manual_seed(0)) + y[:, None]
    return Dataset("clouds", (features,), classes, x[:-50], y[:-50], x[-50:], y[-50:], highest=1.0)
