"""The paper's data sets: their files, where they are found or downloaded from, and ``load``."""

import functools
import hashlib
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pathsgd import PathError
from study.data import Dataset, Split, one_line, read_cifar, read_digits, read_mnist, read_npz, read_svhn
from study.files import lock_folder, read_json

RETRIES = 3
TIMEOUT_SECONDS = 30.0


class Remote(NamedTuple):
    """A file as its authors published it."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class LocalFiles(NamedTuple):
    """The folder that holds most of a data set, or where it would go; the files that are there, and not."""

    folder: Path
    paths: dict[str, Path]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class DatasetSource:
    title: str
    shape: tuple[int, ...]
    classes: int
    counts: tuple[int, int]  # training and test examples of the original
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    folders: tuple[str, ...]  # folders to look in, below the data folder; downloads go to the first
    read: Callable[[Sequence[Path]], Split]
    remotes: tuple[Remote, ...]
    """The files themselves, or one tar.gz archive of all of them, below the folder that is first above."""

    def find_files(self, data_dir: Path) -> LocalFiles:
        """Looks where torchvision, the archives and people put them."""
        places = []
        for name in self.folders:
            folder, files = data_dir / name, self.train_files + self.test_files
            paths = {file: path for file in files if (path := _find_file(folder, file)) is not None}
            places.append(LocalFiles(folder, paths, tuple(file for file in files if file not in paths)))
        return min(places, key=lambda place: len(place.missing))

    @property
    def archive(self) -> Remote | None:
        return self.remotes[0] if self.remotes[0].name.endswith(".tar.gz") else None


def _find_file(folder: Path, name: str) -> Path | None:
    """Finds a file of this name, or unpacked from a gzip file of this name."""
    plain = name.removesuffix(".gz")
    paths = (folder / candidate for candidate in (name, plain, plain.replace("-idx", ".idx")))
    return next((path for path in paths if path.is_file()), None)


def _read_sources() -> dict[str, DatasetSource]:
    readers: dict[str, Callable[[Sequence[Path]], Split]] = {
        "mnist": read_mnist, "cifar10": functools.partial(read_cifar, labels=(10,)),
        "cifar100": functools.partial(read_cifar, labels=(20, 100)), "svhn": read_svhn,
    }  # fmt: skip
    sources = read_json(Path(__file__).with_name("sources.json"), dict)
    for name, source in sources.items():
        source["remotes"] = [Remote(*remote) for remote in source["remotes"]]
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in source.items()}
        sources[name] = DatasetSource(**fields, read=readers[name])
    return sources


SOURCES = _read_sources()
"""Data sets by the name that ``load`` takes. Sizes and checksums are those of the authors' own files."""


def load(name: str, data_dir: Path | None = None, *, download: bool = True) -> Dataset:
    """Loads ``digits``, ``mnist``, ``cifar10``, ``cifar100``, ``svhn``, or ``name=path.npz``.

    Files are looked for in ``data_dir``, by default $PATHSGD_DATA or ~/.cache/pathsgd/data, and downloaded to
    it where they are missing. A PathError says what is missing, damaged or not the original."""
    short, is_file, path = name.partition("=")
    if is_file:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", short):
            raise PathError(f"{short!r} cannot name a data set: use letters, digits, '.', '_' and '-'")
        return read_npz(short, Path(path).expanduser())
    if name == "digits":
        return read_digits()
    if name not in SOURCES:
        known = ", ".join(["digits", *SOURCES, "NAME=FILE.npz"])
        raise PathError(f"no data set is called {name!r}: choose from {known}")
    source, paths = SOURCES[name], _obtain(name, data_dir or default_data_dir(), download)
    train_x, train_y = source.read([paths[file] for file in source.train_files])
    test_x, test_y = source.read([paths[file] for file in source.test_files])
    return Dataset(name, source.shape, source.classes, train_x, train_y, test_x, test_y)


def default_data_dir() -> Path:
    return Path(os.environ.get("PATHSGD_DATA") or "~/.cache/pathsgd/data").expanduser()


def _obtain(name: str, data_dir: Path, download: bool) -> dict[str, Path]:
    """Paths of a data set's files, downloaded or unpacked where they are missing."""
    source = SOURCES[name]
    local, archive = source.find_files(data_dir), source.archive
    if local.missing and (download or (archive is not None and (data_dir / archive.name).is_file())):
        with lock_folder(data_dir, "--data-dir or PATHSGD_DATA", wait=True):
            local = source.find_files(data_dir)  # another process may have written them
            if archive is not None and local.missing:
                _obtain_archive(archive, source, data_dir, local)
            elif archive is None:
                for remote in source.remotes:
                    if remote.name in local.missing:
                        _download(remote, local.folder)
        local = source.find_files(data_dir)
    if local.missing:
        raise PathError(describe_missing(name, data_dir))
    return local.paths


def _obtain_archive(archive: Remote, source: DatasetSource, data_dir: Path, local: LocalFiles) -> None:
    path = data_dir / archive.name
    put_there = path.is_file()
    if not put_there:
        _download(archive, data_dir)
    elif (sha256 := hashlib.sha256(path.read_bytes()).hexdigest()) != archive.sha256:
        wrong = f"{path} is not the original: its sha256 is {sha256}, expected {archive.sha256}"
        raise PathError(f"{wrong}; delete it to have it downloaded again")
    try:
        local.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=local.folder) as aside:
            with tarfile.open(path) as members:
                for name in local.missing:
                    members.extract(f"{source.folders[0]}/{name}", aside, filter="data")
            for name in local.missing:
                os.replace(Path(aside, source.folders[0], name), local.folder / name)
    except (OSError, tarfile.TarError, KeyError, EOFError) as error:
        wrong = f"{path} cannot be unpacked to {local.folder} ({one_line(error)})"
        raise PathError(f"{wrong}: delete it if it is broken, or choose a folder with --data-dir") from error
    if not put_there:
        path.unlink()


def _download(remote: Remote, folder: Path) -> None:
    """Downloads a file into a folder, where it appears once it is whole and has the right checksum."""
    import pooch
    import requests

    target = folder / remote.name
    print(f"downloading {remote.url} ({remote.size / 1e6:.1f} MB) to {target}", file=sys.stderr)
    pooch.get_logger().setLevel("ERROR")  # what it would say is said here
    files = pooch.create(
        folder, base_url="", registry={remote.name: f"sha256:{remote.sha256}"},
        urls={remote.name: remote.url}, retry_if_failed=RETRIES,
    )  # fmt: skip
    # The checksum is that of the file as it is, not of a compressed transfer.
    headers = {"Accept-Encoding": "identity"}
    downloader = pooch.HTTPDownloader(sys.stderr.isatty(), timeout=TIMEOUT_SECONDS, headers=headers)
    try:
        files.fetch(remote.name, downloader=downloader)
    except requests.RequestException as error:
        wrong = f"{remote.url} cannot be downloaded ({one_line(error)})"
        raise PathError(f"{wrong}: run again, or put the file at {target}") from error
    except ValueError as error:
        wrong = f"{remote.url} is not the original: its sha256 is not {remote.sha256}"
        raise PathError(f"{wrong}; it was deleted, run again or put the original at {target}") from error
    except OSError as error:
        advice = "choose another folder with --data-dir"
        raise PathError(f"{target} cannot be written ({one_line(error)}): {advice}") from error


def describe_missing(name: str, data_dir: Path) -> str:
    """Says which files of a data set are missing, and how to get them."""
    source, local = SOURCES[name], SOURCES[name].find_files(data_dir)
    if local.paths:
        missing = f"{source.title} in {local.folder} lacks {', '.join(local.missing)}"
    else:
        folders = ", ".join(source.folders)
        missing = f"{source.title} is not in {data_dir} (no {local.missing[0]} in {folders})"
    return f"{missing}: `python -m study data {name}` downloads it, --data-dir names another folder"
