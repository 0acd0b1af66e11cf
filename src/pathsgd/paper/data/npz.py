"""Any data set in an npz file: train_x, train_y, test_x, test_y, read without unpickling anything.

Inputs are (n, features), (n, height, width) or (n, channels, height, width). uint8 is divided by 255; floats
have to be finite and are taken as they are. Labels are whole numbers from 0.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pathsgd import PathError
from pathsgd.console.optional_imports import import_optional
from pathsgd.paper.data.dataset import Dataset, check_learnable
from pathsgd.paper.data.file_checks import one_line

NAMES = ("train_x", "train_y", "test_x", "test_y")
LARGEST = 4 << 30
"""Bytes of all arrays together, so that a small file cannot inflate to more than a memory."""
MOST_CLASSES = 1 << 16


def read_npz(name: str, path: Path) -> Dataset:
    if not path.is_file():
        raise PathError(f"{path} is not a file: name one as {name}=FILE.npz")
    arrays = _read(path)
    inputs = {split: _inputs(arrays[f"{split}_x"], path, f"{split}_x") for split in ("train", "test")}
    labels = {split: _labels(arrays[f"{split}_y"], path, f"{split}_y") for split in ("train", "test")}
    for split in ("train", "test"):
        if len(inputs[split]) != len(labels[split]):
            raise PathError(
                f"{path} has {len(inputs[split])} inputs in {split}_x and {len(labels[split])} labels in "
                f"{split}_y: save as many of both"
            )
    train, test = inputs["train"], inputs["test"]
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise PathError(
            f"{path} has train_x {tuple(train.shape)} of {train.dtype} and test_x {tuple(test.shape)} of "
            f"{test.dtype}: save both with one shape and one type"
        )
    shape = tuple(train.shape[1:])
    classes = 1 + max(int(y.max()) for y in labels.values())
    data = Dataset(
        name, (1, *shape) if len(shape) == 2 else shape, classes,
        train.flatten(1), labels["train"], test.flatten(1), labels["test"],
        255.0 if train.dtype == torch.uint8 else 1.0,
    )  # fmt: skip
    check_learnable(data, str(path))
    return data


def _read(path: Path) -> dict[str, Any]:
    numpy = import_optional("numpy", f"reading {path.name}")
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
        missing = [name for name in NAMES if name not in sizes]
        total = sum(sizes[name] for name in NAMES if name in sizes)
        if not missing and total <= LARGEST:
            with numpy.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in NAMES}
    except Exception as error:  # whatever a broken file makes zipfile and numpy raise
        raise PathError(
            f"{path} is no sound npz file ({one_line(error)}): write it anew with numpy.savez"
        ) from error
    if missing:
        raise PathError(f"{path} lacks {', '.join(missing)}: save {', '.join(NAMES)} with numpy.savez")
    raise PathError(f"{path} claims {total} bytes of arrays, expected at most {LARGEST}: save fewer")


def _inputs(array: Any, path: Path, name: str) -> Tensor:
    if array.ndim not in (2, 3, 4) or not array.size:
        raise PathError(
            f"{path} has {name} {array.shape}, expected (n, features), (n, height, width) or "
            "(n, channels, height, width), none of them 0: save it in one of these shapes"
        )
    if array.dtype.name == "uint8":
        return torch.tensor(array)
    if array.dtype.kind != "f":
        raise PathError(
            f"{path} has {name} of type {array.dtype}, expected uint8 or floats: convert it first"
        )
    x = torch.tensor(array).float()
    if not bool(torch.isfinite(x).all()):
        raise PathError(f"{path} has {name} with values that are not finite in float32: mend or drop them")
    return x


def _labels(array: Any, path: Path, name: str) -> Tensor:
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise PathError(
            f"{path} has {name} {array.shape} of {array.dtype}, expected (n,) of an integer type: save it so"
        )
    lowest, largest = int(array.min()), int(array.max())
    if lowest < 0 or largest >= MOST_CLASSES:
        raise PathError(
            f"{path} has {name} from {lowest} to {largest}, expected labels from 0 to at most "
            f"{MOST_CLASSES - 1}: number the classes from 0"
        )
    return torch.tensor(array.astype("int64"))
