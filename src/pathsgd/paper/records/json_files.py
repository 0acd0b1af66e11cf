"""JSON files: written whole or not at all, and read with errors that name the file."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from pathsgd import PathError
from pathsgd.console.files import write_atomically


def encode(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, encode(value))


def read_json(path: Path, kind: type | None = None) -> Any:
    """What :func:`write_json` wrote; an error if it is not of this type."""
    try:
        found = json.loads(path.read_bytes(), parse_constant=_refuse)
    except FileNotFoundError:
        raise PathError(f"{path} is not there") from None
    except (ValueError, RecursionError) as error:
        raise PathError(f"{path} is not JSON ({error})") from None
    if kind is not None and not isinstance(found, kind):
        raise PathError(f"{path}: expected {'an object' if kind is dict else 'a list'}")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON lines file, up to the first that is not whole."""
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


def encode_line(values: dict[str, Any]) -> bytes:
    """One line, with null for numbers that are not finite."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return (json.dumps(plain) + "\n").encode()
