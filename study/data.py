"""Data sets in memory, and readers of idx, binary CIFAR, MATLAB 5 and npz files. Nothing is unpickled."""

import gzip
import hashlib
import math
import struct
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathsgd import PathError

LARGEST_INPUT = math.sqrt(torch.finfo(torch.float32).max)
TABLE_1 = ("data set", "dimensionality", "classes", "training set", "test set")  # as in the paper


def short_name(dataset: str) -> str:
    """Returns the name in ``name=path.npz``; other data sets keep theirs."""
    return dataset.partition("=")[0]


@dataclass(frozen=True)
class Dataset:
    """Inputs as rows, and labels; a PathError if shapes, types or labels do not fit each other."""

    name: str
    shape: tuple[int, ...]  # of one input, channels first: (1, 28, 28), (3, 32, 32), or (features,)
    classes: int
    train_x: Tensor  # (n, features), uint8, or float32 where the file held floats
    train_y: Tensor  # (n,) int64, from 0 to classes - 1
    test_x: Tensor
    test_y: Tensor
    highest: float = 255.0  # the stored value that ``scaled`` turns into 1: 16 for digits, 1 for floats

    def __post_init__(self) -> None:
        for split, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if x.shape != (len(y), self.features) or y.ndim != 1 or y.dtype != torch.int64 or not len(y):
                shapes = f"inputs {tuple(x.shape)} and labels {tuple(y.shape)} of {y.dtype}"
                expected = f"(n, {self.features}) and (n,) of torch.int64 with n > 0"
                raise PathError(f"{self.name}: {split} has {shapes}: expected {expected}")
            if x.dtype not in (torch.uint8, torch.float32) or y.min() < 0 or y.max() >= self.classes:
                expected = f"uint8 or float32 inputs and labels from 0 to {self.classes - 1}"
                raise PathError(f"{self.name}: {split} has {x.dtype}: expected {expected}")

    @property
    def features(self) -> int:
        return math.prod(self.shape)

    @property
    def checksum(self) -> str:
        digest = hashlib.sha256(repr((self.shape, self.classes)).encode())
        for tensor in (self.train_x, self.train_y, self.test_x, self.test_y):
            digest.update(tensor.contiguous().numpy().tobytes())
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
            raise PathError(f"{self.name} has test labels that no training example has: {unknown[0]}")
        largest = max(float(x.abs().max()) for x in (self.train_x.float(), self.test_x.float()))
        if largest > LARGEST_INPUT:
            wrong = f"inputs as large as {largest:.2g}, whose squares overflow float32"
            raise PathError(f"{self.name} has {wrong}: scale them down")


def dimensionality(shape: tuple[int, ...]) -> str:
    features = math.prod(shape)
    if len(shape) != 3:
        return str(features)
    channels, height, width = shape
    kind = {1: "grey", 3: "colour"}.get(channels, f"{channels} channels")
    return f"{features} ({height}x{width} {kind})"


Split = tuple[Tensor, Tensor]  # inputs (n, features) and labels (n,) int64
GZIP = b"\x1f\x8b"
CIFAR_PIXELS = 3 * 32 * 32
NPZ_NAMES = ("train_x", "train_y", "test_x", "test_y")
MOST_BYTES = 4 << 30  # bound on what a gzip file inflates to
MOST_CLASSES = 1 << 16
DIGITS_TEST_EVERY = 5


def one_line(error: BaseException) -> str:
    """Describes an error without the file name that an OSError repeats."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def _broken(path: Path, fault: str) -> PathError:
    return PathError(f"{path} {fault}: delete it to have it downloaded again, or put the original there")


def _read_bytes(path: Path) -> bytearray:
    try:
        with path.open("rb") as file:
            if file.peek(2)[:2] != GZIP:
                return bytearray(file.read())
            with gzip.open(file) as stream:
                return bytearray(stream.read(MOST_BYTES))
    except (OSError, EOFError, zlib.error) as error:
        raise _broken(path, f"cannot be read to its end ({one_line(error)})") from error


def _check_labels(labels: Tensor, classes: int, path: Path, first: int = 0) -> None:
    lowest, largest, last = int(labels.min()), int(labels.max()), first + classes - 1
    if lowest < first or largest > last:
        raise _broken(path, f"has labels from {lowest} to {largest}, expected {first} to {last}")


def read_mnist(paths: Sequence[Path]) -> Split:
    images, labels = paths
    x, y = _read_idx(images, (28, 28)), _read_idx(labels, ()).long()
    if len(x) != len(y):
        raise _broken(images, f"has {len(x)} images and {labels.name} {len(y)} labels")
    _check_labels(y, 10, labels)
    return x.flatten(1), y


def _read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Reads bytes of shape (n, *shape), after a big-endian magic number and the sizes."""
    body, axes = _read_bytes(path), 1 + len(shape)
    start = 4 + 4 * axes
    if len(body) < start:
        raise _broken(path, f"ends within its header, after {len(body)} of {start} bytes")
    magic, count, *sizes = struct.unpack_from(f">{1 + axes}I", body)
    if magic != 0x0800 + axes:
        raise _broken(path, f"starts with {magic:#010x}, expected {0x0800 + axes:#010x} (idx)")
    if tuple(sizes) != shape:
        wrong, right = ("x".join(map(str, one)) for one in (sizes, shape))
        raise _broken(path, f"holds images of {wrong} pixels, expected {right}")
    size = count * math.prod(shape)
    if not count or len(body) != start + size:
        raise _broken(path, f"promises {count} examples of {size} bytes and holds {len(body) - start}")
    return torch.frombuffer(body, dtype=torch.uint8, offset=start).view(count, *shape)


def read_cifar(paths: Sequence[Path], labels: Sequence[int]) -> Split:
    """Reads records of label bytes and 3072 pixels. ``labels`` has the classes of each label byte; the last
    one is kept: CIFAR-100 has the superclass before the class."""
    splits = [_read_cifar_file(path, labels) for path in paths]
    return torch.cat([x for x, _ in splits]), torch.cat([y for _, y in splits])


def _read_cifar_file(path: Path, labels: Sequence[int]) -> Split:
    body, record = _read_bytes(path), len(labels) + CIFAR_PIXELS
    left = len(body) % record
    if not body or left:
        raise _broken(path, f"has {len(body)} bytes, expected records of {record} ({left} are left over)")
    records = torch.frombuffer(body, dtype=torch.uint8).view(-1, record)
    for place, classes in enumerate(labels):  # superclasses too: they tell a shifted file from a sound one
        _check_labels(records[:, place], classes, path)
    return records[:, len(labels) :].contiguous(), records[:, len(labels) - 1].long()


def read_svhn(paths: Sequence[Path]) -> Split:
    """Reads a MATLAB 5 file with X (32, 32, 3, n) and y (n, 1), where 10 stands for digit 0."""
    import scipy.io

    (path,) = paths
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy warns of an array it cannot read and gives a string
            with path.open("rb") as file:
                arrays = scipy.io.loadmat(file, appendmat=False, variable_names=["X", "y"])
    except Exception as error:  # whatever a broken file makes the parser raise
        raise _broken(path, f"is no sound MATLAB 5 file ({one_line(error)})") from error
    x, y = (np.asarray(arrays.get(name, ())) for name in ("X", "y"))
    count = x.shape[-1]
    sound = x.shape == (32, 32, 3, count) and y.shape == (count, 1) and x.dtype == np.uint8
    if not sound or y.dtype.kind not in "iuf" or (y % 1).any():
        raise _broken(path, f"has X {x.shape} of {x.dtype} and y {y.shape} of {y.dtype}")
    labels = torch.tensor(y.reshape(-1).tolist()).long()
    _check_labels(labels, 10, path, first=1)
    return torch.from_numpy(x).permute(3, 2, 0, 1).reshape(count, -1).contiguous(), labels % 10


def read_digits() -> Dataset:
    """scikit-learn's digits: 1797 images of 8x8 pixels with 17 shades.

    They come without a split, in the order of their writers. The fifth, tenth, ... example of each class is
    for testing: both parts have every writer and every class in proportion, and nothing is drawn at random.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.tensor(bunch.data).to(torch.uint8), torch.tensor(bunch.target).long()
    nth = torch.nn.functional.one_hot(y).cumsum(0).gather(1, y[:, None])[:, 0]  # of its class, from 1
    test = nth % DIGITS_TEST_EVERY == 0
    return Dataset("digits", (1, 8, 8), 10, x[~test], y[~test], x[test], y[test], highest=16.0)


def read_npz(name: str, path: Path) -> Dataset:
    """Reads train_x, train_y, test_x and test_y.

    Inputs are (n, features), (n, height, width) or (n, channels, height, width). uint8 is divided by 255;
    floats have to be finite and are taken as they are. Labels are whole numbers from 0.
    """
    if not path.is_file():
        raise PathError(f"{path} is not a file: name one as {name}=FILE.npz")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            missing = [one for one in NPZ_NAMES if one not in arrays]
            values = {one: arrays[one] for one in NPZ_NAMES if one in arrays}
    except Exception as error:  # whatever a broken file makes zipfile and numpy raise
        raise PathError(f"{path} is no sound npz file ({one_line(error)}): use numpy.savez") from error
    if missing:
        raise PathError(f"{path} lacks {', '.join(missing)}: save {', '.join(NPZ_NAMES)} with numpy.savez")
    train, test = (_convert_inputs(values[name], path, name) for name in ("train_x", "test_x"))
    train_y, test_y = (_convert_labels(values[name], path, name) for name in ("train_y", "test_y"))
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise PathError(f"{path} has train_x and test_x of two kinds: save both with one shape and one type")
    shape, classes = tuple(train.shape[1:]), 1 + max(int(train_y.max()), int(test_y.max()))
    highest = 255.0 if train.dtype == torch.uint8 else 1.0
    shape = (1, *shape) if len(shape) == 2 else shape
    data = Dataset(name, shape, classes, train.flatten(1), train_y, test.flatten(1), test_y, highest)
    data.check_learnable()
    return data


def _convert_inputs(array: Any, path: Path, name: str) -> Tensor:
    numbers = array.dtype == np.uint8 or array.dtype.kind == "f"
    if array.ndim not in (2, 3, 4) or not array.size or not numbers:
        expected = "uint8 or floats, (n, features), (n, height, width) or (n, channels, height, width)"
        raise PathError(f"{path} has {name} {array.shape} of {array.dtype}, expected {expected}")
    x = torch.tensor(array)
    if x.dtype != torch.uint8 and not bool(torch.isfinite(x := x.float()).all()):
        raise PathError(f"{path} has {name} with values that are not finite in float32: mend or drop them")
    return x


def _convert_labels(array: Any, path: Path, name: str) -> Tensor:
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise PathError(f"{path} has {name} {array.shape} of {array.dtype}, expected (n,) of an integer type")
    lowest, largest = int(array.min()), int(array.max())
    if lowest < 0 or largest >= MOST_CLASSES:
        raise PathError(f"{path} has {name} from {lowest} to {largest}, expected 0 to {MOST_CLASSES - 1}")
    return torch.tensor(array.astype("int64"))
