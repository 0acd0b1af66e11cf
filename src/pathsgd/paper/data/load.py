"""``load``: a data set by its name, from local files where there are any, else downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pathsgd import PathError
from pathsgd.paper.data.archive import unpack
from pathsgd.paper.data.dataset import Dataset
from pathsgd.paper.data.digits import read_digits
from pathsgd.paper.data.download import check_sha256, fetch
from pathsgd.paper.data.npz import read_npz
from pathsgd.paper.data.sources import SOURCES, DatasetSource, LocalFiles
from pathsgd.paper.records.folder_lock import lock_folder


def load(name: str, data_dir: Path | None = None, *, download: bool = True) -> Dataset:
    """Loads a data set.

    Args:
        name: ``digits``, ``mnist``, ``cifar10``, ``cifar100``, ``svhn``, or ``name=path.npz``.
        data_dir: Where its files are and downloads go; by default $PATHSGD_DATA, or ~/.cache/pathsgd/data.
        download: Whether missing files may be downloaded.

    Returns:
        The data set in memory.

    Raises:
        PathError: There is no such data set, or its files are missing, damaged or not the original.

    Example:
        >>> load("digits").features
        64
    """
    own, is_file, path = name.partition("=")
    if is_file:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", own):
            raise PathError(f"{own!r} cannot name a data set: use letters, digits, '.', '_' and '-'")
        return read_npz(own, _expand_home(path))
    if name == "digits":
        return read_digits()
    if name not in SOURCES:
        known = ", ".join(["digits", *SOURCES])
        raise PathError(
            f"no data set is called {name!r}: choose from {known}, or give your own as NAME=FILE.npz"
        )
    source = SOURCES[name]
    paths = obtain(source, data_dir or default_data_dir(), download)
    (train_x, train_y), (test_x, test_y) = source.read(paths)
    return Dataset(name, source.shape, source.classes, train_x, train_y, test_x, test_y)


def default_data_dir() -> Path:
    """$PATHSGD_DATA, or ~/.cache/pathsgd/data."""
    return _expand_home(os.environ.get("PATHSGD_DATA") or "~/.cache/pathsgd/data")


def _expand_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise PathError(
            f"{path}: there is no home folder here; name a folder with --data-dir or PATHSGD_DATA"
        ) from error


def obtain(source: DatasetSource, data_dir: Path, download: bool) -> dict[str, Path]:
    """The paths of a data set's files, downloaded or unpacked where they are missing. Found ones are kept."""
    found = source.find_files(data_dir)
    archive = source.archive
    if found.missing and (download or (archive is not None and (data_dir / archive.name).is_file())):
        with lock_folder(data_dir, "--data-dir or PATHSGD_DATA", wait=True):
            found = source.find_files(data_dir)  # another process may have written them
            if archive is not None and found.missing:
                _unpack(source, data_dir, found)
            elif archive is None:
                for remote in source.remotes:
                    if remote.name in found.missing:
                        fetch(remote, found.folder)
        found = source.find_files(data_dir)
    if found.missing:
        raise PathError(describe_missing(source, data_dir, found))
    return found.paths


def _unpack(source: DatasetSource, data_dir: Path, found: LocalFiles) -> None:
    archive = source.archive
    assert archive is not None
    path = data_dir / archive.name
    put_there = path.is_file()
    if put_there:
        check_sha256(path, archive)
    else:
        fetch(archive, data_dir)
    unpack(path, source.folders[0], found.missing, found.folder)
    if not put_there:
        path.unlink()


def describe_missing(source: DatasetSource, data_dir: Path, found: LocalFiles) -> str:
    """What is missing, and how to get it."""
    name = next(key for key, value in SOURCES.items() if value.title == source.title)
    if found.paths:
        what = f"{source.title} in {found.folder} lacks {', '.join(found.missing)}"
    else:
        what = f"{source.title} is not in {data_dir} (no {source.files[0]} in {', '.join(source.folders)})"
    return f"{what}: `pathsgd data {name}` downloads it, --data-dir names another folder"
