"""Files and folders: atomic writes, JSON that is checked against dataclasses, locks and checksums."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import math
import os
import sys
import types
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import filelock
from torch import Tensor

from pathsgd import PathError

T = TypeVar("T")
CHUNK_BYTES = 1 << 24


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside ``path`` and renames, so that there is the old file or the new one, never a part.

    An OSError names ``path``, not the temporary file.
    """
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_temporaries(folder: Path) -> None:
    """Removes what a kill in :func:`write_atomically` has left in a folder that nobody else writes to."""
    for left in folder.glob(f".*.{'[0-9a-f]' * 8}"):
        left.unlink(missing_ok=True)


def encode_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, encode_json(value))


def read_json(path: Path, kind: type | None = None) -> Any:
    """Reads a JSON file; a PathError names the file if it is missing, broken or of another type."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise PathError(f"{path} is not there") from None
    except (ValueError, RecursionError) as error:
        raise PathError(f"{path} is not JSON ({error})") from None
    if kind is not None and not isinstance(value, kind):
        raise PathError(f"{path}: expected {'an object' if kind is dict else 'a list'}")
    return value


def encode_line(values: dict[str, Any]) -> bytes:
    """One line of a JSON lines file, with null for numbers that are not finite."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return (json.dumps(plain) + "\n").encode()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON lines file up to the first line that is not whole."""
    lines: list[dict[str, Any]] = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_bytes().split(b"\n")[:-1]:
            value = json.loads(line)
            if not isinstance(value, dict):
                break
            lines.append(value)
    return lines


def from_json(config: type[T], values: Any, where: str) -> T:
    """Builds the dataclass that ``dataclasses.asdict`` gave; ``where`` names the file in errors."""
    if not isinstance(values, Mapping):
        raise PathError(f"{where}: expected an object with the fields of {config.__name__}")
    hints = get_type_hints(config)
    known = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise PathError(f"{where}: unknown field {unknown[0]!r} (known: {', '.join(known)})")
    checked = {name: _check(hints[name], value, f"{where}: {name}") for name, value in values.items()}
    try:
        return config(**checked)
    except TypeError as error:
        raise PathError(f"{where}: {str(error).split('__init__() ')[-1]}") from None


def _check(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_json(kind, value, where)  # type: ignore[arg-type]
    if get_origin(kind) in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise PathError(f"{where}: expected a list, found {value!r}")
        return get_origin(kind)(_check(get_args(kind)[0], one, where) for one in value)
    if get_origin(kind) in (Union, types.UnionType):  # None or one type
        (kind,) = (one for one in get_args(kind) if one is not type(None))
        return None if value is None else _check(kind, value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise PathError(f"{where}: expected one of {', '.join(get_args(kind))}, found {value!r}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PathError(f"{where}: expected {kind.__name__}, found {value!r}")
    return value


@contextmanager
def lock_folder(folder: Path, option: str = "--out", wait: bool = False) -> Iterator[None]:
    """Makes the folder and locks it for this process; ``option`` is named in errors."""
    lock = filelock.FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if not wait:
            advice = f"wait for it, stop it, or choose another folder ({option})"
            raise PathError(f"another process is at work in {folder}: {advice}") from None
        print(f"waiting for another process that writes to {folder}", file=sys.stderr)
        lock.acquire()
    except OSError as error:
        wrong = f"{folder} is not a folder that can be written to ({error.strerror})"
        raise PathError(f"{wrong}: choose another ({option})") from None
    try:
        yield
    finally:
        lock.release()


def checksum_state(head: bytes, state: Any) -> str:
    """Returns the sha256 of some bytes and of every bit of a state dict."""
    digest = hashlib.sha256(head)
    _add_state(digest, state)
    return digest.hexdigest()


def _add_state(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        add_tensor(digest, value.detach().cpu())
    elif isinstance(value, dict):
        for key, one in value.items():
            digest.update(repr(key).encode())
            _add_state(digest, one)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}".encode())
        for one in value:
            _add_state(digest, one)
    else:
        digest.update(repr(value).encode())


def add_tensor(digest: Any, tensor: Tensor) -> None:
    """Adds the bytes of a CPU tensor of any type to a hash; numpy has no bfloat16."""
    whole = tensor.contiguous()
    size, start = whole.numel() * whole.element_size(), whole.data_ptr()
    for k in range(0, size, CHUNK_BYTES):
        digest.update(ctypes.string_at(start + k, min(CHUNK_BYTES, size - k)))
