"""Files and folders: atomic writes, JSON checked against dataclasses, locks, the manifest of a study."""

import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import filelock
import torch

from pathsgd import PathError

T = TypeVar("T")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside ``path`` and renames, so that there is the old file or the new one, never a part."""
    temporary = path.parent / f".{path.name}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
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


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


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


def read_list(path: Path) -> list[dict[str, Any]]:
    return read_json(path, list) if path.exists() else []


def encode_line(values: dict[str, Any]) -> bytes:
    """One line of a JSON lines file, with null for numbers that are not finite."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return (json.dumps(plain) + "\n").encode()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON lines file up to the first line that is not whole."""
    lines: list[dict[str, Any]] = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_bytes().split(b"\n")[:-1]:
            lines.append(dict(json.loads(line)))
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
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return from_json(kind, value, where)  # type: ignore[arg-type]
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(_check(parts[0], one, where) for one in value)
    if origin in (Union, types.UnionType):  # one type or None
        return None if value is None else _check(parts[0], value, where)
    if kind is float and type(value) is int:
        return float(value)
    if value in parts if origin is Literal else type(value) is kind:
        return value
    expected = f"one of {', '.join(parts)}" if origin is Literal else "a list" if origin else kind.__name__
    raise PathError(f"{where}: expected {expected}, found {value!r}")


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


PACKAGES = ("pathsgd", "torch", "triton", "numpy", "scipy", "scikit-learn", "matplotlib")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def add_manifest(path: Path, device: torch.device) -> None:
    """Adds this process, which trains on this device, to the list in a file, unless an equal one is there."""
    manifests, new = read_list(path), _make_manifest(device)
    if not any({**one, "written": new["written"]} == new for one in manifests):
        write_json(path, [*manifests, new])


def _make_manifest(device: torch.device) -> dict[str, Any]:
    return {
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m study", *sys.argv[1:]]),
        "revision": _find_revision(),
        "python": platform.python_version(),
        "packages": {one.name: one.version for one in distributions() if one.name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def _find_revision() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
