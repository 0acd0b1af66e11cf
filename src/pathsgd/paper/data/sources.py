"""The paper's four data sets: their files, where they come from and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pathsgd.paper.data.cifar import read_cifar
from pathsgd.paper.data.dataset import Split
from pathsgd.paper.data.idx import read_mnist
from pathsgd.paper.data.svhn import read_svhn


@dataclass(frozen=True)
class Remote:
    """A file as its authors published it."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class LocalFiles:
    """The folder that holds most of a data set, or where it would go."""

    folder: Path
    paths: dict[str, Path]
    """The files that are there."""
    missing: tuple[str, ...]


def _find_file(folder: Path, name: str) -> Path | None:
    """A file of this name, or unpacked from a gzip file of this name."""
    plain = name.removesuffix(".gz")
    paths = (folder / candidate for candidate in (name, plain, plain.replace("-idx", ".idx")))
    return next((path for path in paths if path.is_file()), None)


@dataclass(frozen=True)
class DatasetSource:
    title: str
    shape: tuple[int, ...]
    classes: int
    counts: tuple[int, int]
    """Training and test examples of the original."""
    files: tuple[str, ...]
    """All that are needed."""
    folders: tuple[str, ...]
    """Where they are looked for below the data folder; downloads go to the first."""
    remotes: tuple[Remote, ...]
    """The files themselves, or one tar.gz archive of all of them, below the folder that is first above."""
    read: Callable[[Mapping[str, Path]], tuple[Split, Split]]
    """From the paths of the files by name to the training and the test set."""

    def find_files(self, data_dir: Path) -> LocalFiles:
        """Looks where torchvision, the archives and people put them."""
        places = []
        for name in self.folders:
            folder = data_dir / name
            paths = {file: path for file in self.files if (path := _find_file(folder, file)) is not None}
            places.append(LocalFiles(folder, paths, tuple(file for file in self.files if file not in paths)))
        return min(places, key=lambda found: len(found.missing))

    @property
    def archive(self) -> Remote | None:
        return self.remotes[0] if self.remotes[0].name.endswith(".tar.gz") else None


MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
SVHN_URL = "http://ufldl.stanford.edu/housenumbers/"
MNIST_FILES = (
    "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz",
)  # fmt: skip
CIFAR10_TRAIN = tuple(f"data_batch_{k}.bin" for k in range(1, 6))
SVHN_FILES = ("train_32x32.mat", "test_32x32.mat")


def _remotes(url: str, *files: tuple[str, int, str]) -> tuple[Remote, ...]:
    return tuple(Remote(url + name, size, sha256) for name, size, sha256 in files)


SOURCES = {
    "mnist": DatasetSource(
        title="MNIST", shape=(1, 28, 28), classes=10, counts=(60000, 10000), files=MNIST_FILES,
        folders=("MNIST/raw", "MNIST", "mnist/raw", "mnist", "."),
        remotes=_remotes(
            MNIST_URL,
            (MNIST_FILES[0], 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (MNIST_FILES[1], 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (MNIST_FILES[2], 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (MNIST_FILES[3], 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
        read=lambda paths: (
            read_mnist(*(paths[name] for name in MNIST_FILES[:2])),
            read_mnist(*(paths[name] for name in MNIST_FILES[2:])),
        ),
    ),
    "cifar10": DatasetSource(
        title="CIFAR-10", shape=(3, 32, 32), classes=10, counts=(50000, 10000),
        files=(*CIFAR10_TRAIN, "test_batch.bin"),
        folders=("cifar-10-batches-bin", "CIFAR10/cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "."),
        remotes=_remotes(
            CIFAR_URL,
            ("cifar-10-binary.tar.gz", 170052171,
             "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
        ),
        read=lambda paths: (
            read_cifar([paths[name] for name in CIFAR10_TRAIN], (10,)),
            read_cifar([paths["test_batch.bin"]], (10,)),
        ),
    ),
    "cifar100": DatasetSource(
        title="CIFAR-100", shape=(3, 32, 32), classes=100, counts=(50000, 10000),
        files=("train.bin", "test.bin"),
        folders=("cifar-100-binary", "CIFAR100/cifar-100-binary", "cifar100/cifar-100-binary", "."),
        remotes=_remotes(
            CIFAR_URL,
            ("cifar-100-binary.tar.gz", 168513733,
             "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
        ),
        read=lambda paths: (
            read_cifar([paths["train.bin"]], (20, 100)),
            read_cifar([paths["test.bin"]], (20, 100)),
        ),
    ),
    "svhn": DatasetSource(
        title="SVHN", shape=(3, 32, 32), classes=10, counts=(73257, 26032), files=SVHN_FILES,
        folders=("SVHN", "svhn", "."),
        remotes=_remotes(
            SVHN_URL,
            (SVHN_FILES[0], 182040794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
            (SVHN_FILES[1], 64275384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
        ),
        read=lambda paths: (read_svhn(paths[SVHN_FILES[0]]), read_svhn(paths[SVHN_FILES[1]])),
    ),
}  # fmt: skip
"""By the name that ``load`` takes. Sizes and checksums are those of the authors' own files."""
