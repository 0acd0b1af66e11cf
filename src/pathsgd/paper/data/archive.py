"""Takes the expected files, and nothing else, out of a tar.gz archive."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from pathsgd import PathError
from pathsgd.paper.data.file_checks import CHUNK, one_line

INFLATED = 256 << 20
"""Bytes that an archive may inflate to; those of CIFAR need 1.85e8."""


class BoundedStream(io.RawIOBase):
    """A stream that refuses to give more than ``most`` bytes, whatever headers inside it claim."""

    def __init__(self, stream: Any, most: int, path: Path) -> None:
        self.stream, self.left, self.path, self.most = stream, most, path, most

    def read(self, size: int = -1) -> bytes:
        chunk: bytes = self.stream.read(min(size, self.left + 1) if size >= 0 else self.left + 1)
        self.left -= len(chunk)
        if self.left < 0:
            raise PathError(
                f"{self.path} inflates to more than {self.most} bytes: delete it to have it downloaded again"
            )
        return chunk


def unpack(archive: Path, inside: str, names: Iterable[str], folder: Path) -> None:
    """Writes ``inside``/name of the archive to ``folder``/name for each name: all of them or none.

    Members are known by their whole name and their content is written by us, so that no name, link or mode in
    the archive decides where anything goes.
    """
    wanted = {f"{inside}/{name}": name for name in names}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as aside:
            _write(archive, wanted, Path(aside))
            for name in wanted.values():
                os.replace(Path(aside, name), folder / name)
    except OSError as error:
        raise PathError(
            f"{archive} cannot be unpacked to {folder} ({one_line(error)}): delete it if it is broken, or "
            "choose a folder with --data-dir"
        ) from error


def _write(archive: Path, wanted: dict[str, str], aside: Path) -> None:
    left = dict(wanted)
    try:
        with (
            gzip.open(archive) as inflated,
            tarfile.open(fileobj=cast(Any, BoundedStream(inflated, INFLATED, archive)), mode="r|") as members,
        ):
            for member in members:
                if member.name not in left:
                    continue
                content = members.extractfile(member) if member.isreg() else None
                if content is None:
                    raise PathError(
                        f"{archive} has {member.name} as something else than a plain file: delete the "
                        "archive to have it downloaded again"
                    )
                with (aside / left.pop(member.name)).open("xb") as out:
                    while chunk := content.read(CHUNK):
                        out.write(chunk)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise PathError(
            f"{archive} is no sound tar.gz archive ({one_line(error)}): delete it to have it downloaded again"
        ) from error
    if left:
        raise PathError(f"{archive} lacks {', '.join(left)}: delete it to have it downloaded again")
