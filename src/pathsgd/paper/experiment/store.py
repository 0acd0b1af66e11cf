"""Files that are whole or not there, and folders that one process works in at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from pathsgd.console.files import write_atomically
from pathsgd.errors import PathError


def encoded(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, encoded(value))


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_json(path: Path) -> Any:
    """What :func:`write_json` wrote."""
    try:
        return json.loads(path.read_bytes(), parse_constant=_refused)
    except FileNotFoundError:
        raise PathError(f"{path} is not there") from None
    except (ValueError, RecursionError) as error:
        raise PathError(f"{path} is not JSON ({error})") from None


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; what follows a broken one does not count."""
    found: list[dict[str, Any]] = []
    with suppress(FileNotFoundError):
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                value = json.loads(line)
            except ValueError:
                break
            if not isinstance(value, dict):
                break
            found.append(value)
    return found


def line(values: dict[str, Any]) -> bytes:
    return (json.dumps({name: plain(value) for name, value in values.items()}) + "\n").encode()


def plain(value: Any) -> Any:
    """JSON has no nan and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """The only process at work in a folder. The lock goes when the process does, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise PathError(f"{folder} is not a folder, nor can it be made one: choose another (--out)") from None
    lock = filelock.FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise PathError(
            f"another process is at work in {folder}: wait for it, stop it, or choose another folder (--out)"
        ) from None
    try:
        yield
    finally:
        lock.release()
