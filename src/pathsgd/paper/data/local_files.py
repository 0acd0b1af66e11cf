"""Finds the files of a data set where torchvision, the archives and people put them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pathsgd.paper.data.sources import DatasetSource


@dataclass(frozen=True)
class LocalFiles:
    """The folder that holds most of a data set, or where it would go."""

    folder: Path
    paths: dict[str, Path]
    """Those of the source's files that are there."""
    missing: tuple[str, ...]


def find_files(source: DatasetSource, data_dir: Path) -> LocalFiles:
    best: LocalFiles | None = None
    for name in source.folders:
        folder = data_dir / name
        paths = {file: path for file in source.files if (path := _file(folder, file)) is not None}
        missing = tuple(file for file in source.files if file not in paths)
        if best is None or len(missing) < len(best.missing):
            best = LocalFiles(folder, paths, missing)
    assert best is not None
    return best


def _file(folder: Path, name: str) -> Path | None:
    """A file of this name; of a gzipped one also its content, as unpacking leaves it."""
    for candidate in (name, name.removesuffix(".gz"), name.removesuffix(".gz").replace("-idx", ".idx")):
        if (folder / candidate).is_file():
            return folder / candidate
    return None
