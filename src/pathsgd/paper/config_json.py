"""Dataclasses from JSON, checked field by field."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pathsgd import PathError

T = TypeVar("T")


def from_json(config: type[T], values: Any, where: str) -> T:
    """The dataclass that ``dataclasses.asdict`` gave; ``where`` names the file in errors."""
    if not isinstance(values, Mapping):
        raise PathError(f"{where}: expected an object with the fields of {config.__name__}")
    hints = get_type_hints(config)
    known = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise PathError(f"{where}: unknown field {unknown[0]!r} (known: {', '.join(known)})")
    found = {name: _check(hints[name], value, f"{where}: {name}") for name, value in values.items()}
    try:
        return config(**found)
    except TypeError as error:
        raise PathError(f"{where}: {str(error).split('__init__() ')[-1]}") from None


def _check(kind: Any, value: Any, where: str) -> Any:
    """The value as this type, or an error."""
    if dataclasses.is_dataclass(kind):
        return from_json(kind, value, where)  # type: ignore[arg-type]
    if get_origin(kind) in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise PathError(f"{where}: expected a list, found {value!r}")
        return get_origin(kind)(_check(get_args(kind)[0], one, where) for one in value)
    if get_origin(kind) in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        (kind,) = (one for one in get_args(kind) if one is not type(None))
        return _check(kind, value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise PathError(f"{where}: expected one of {', '.join(get_args(kind))}, found {value!r}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PathError(f"{where}: expected {kind.__name__}, found {value!r}")
    return value
