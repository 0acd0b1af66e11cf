"""One process at a time in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from pathsgd import PathError


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Makes the folder and locks it. The lock ends with the process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise PathError(f"{folder} is not a folder, nor can it be made one: choose another (--out)") from None
    try:
        with filelock.FileLock(folder / ".lock", timeout=0):
            yield
    except filelock.Timeout:
        raise PathError(
            f"another process is at work in {folder}: wait for it, stop it, or choose another folder (--out)"
        ) from None
