"""Unpacks the files of a data set from a tar.gz archive."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pathsgd import PathError
from pathsgd.paper.data.file_checks import one_line


def unpack(archive: Path, inside: str, names: Iterable[str], folder: Path) -> None:
    """Writes ``inside``/name of the archive to ``folder``/name for each name: all of them or none.

    The sha256 of the archive has been checked: it holds these files, and nothing that is harmful.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as aside:
            with tarfile.open(archive) as members:
                for name in names:
                    members.extract(f"{inside}/{name}", aside, filter="data")
            for name in names:
                os.replace(Path(aside, inside, name), folder / name)
    except (OSError, tarfile.TarError, KeyError, EOFError) as error:
        raise PathError(
            f"{archive} cannot be unpacked to {folder} ({one_line(error)}): delete it if it is broken, or "
            "choose a folder with --data-dir"
        ) from error
