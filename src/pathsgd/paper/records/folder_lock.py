"""One process at a time in a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from pathsgd import PathError


@contextmanager
def lock_folder(folder: Path, option: str = "--out", wait: bool = False) -> Iterator[None]:
    """Makes the folder and locks it, or waits until another process has released it.

    The lock ends with the process, however that ends. ``option`` is named in errors.
    """
    lock = filelock.FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if not wait:
            raise PathError(
                f"another process is at work in {folder}: wait for it, stop it, or choose another folder "
                f"({option})"
            ) from None
        print(f"waiting for another process that writes to {folder}", file=sys.stderr)
        lock.acquire()
    except OSError as error:
        raise PathError(
            f"{folder} is not a folder that can be written to ({error.strerror}): choose another ({option})"
        ) from None
    try:
        yield
    finally:
        lock.release()
