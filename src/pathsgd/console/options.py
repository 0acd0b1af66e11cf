"""A typed configuration as options of the command line, and as JSON.

Each field of a dataclass becomes ``--its-name``; its metadata ``help`` says what it means, its type how it is
read. Nested dataclasses become ``--outer-inner``.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pathsgd.errors import PathError

T = TypeVar("T")


Parser = argparse.ArgumentParser | argparse._ArgumentGroup


def add_options(parser: Parser, config: type[Any], prefix: str = "", **shown: Any) -> None:
    """An option for each field. What is not given stays out of the parsed options, so that a preset or a file
    can fill it in; ``shown`` are defaults to print in their place."""
    from pathsgd.paper.config_json import field_docs  # the docstrings under the fields

    hints, docs = get_type_hints(config), field_docs(config)
    for field in dataclasses.fields(config):
        kind, name = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            add_options(parser, kind, prefix=f"{name}_")
            continue
        help_text = docs.get(field.name)
        if help_text is None:
            continue  # not for the command line
        default = shown.get(field.name, field.default)
        flag = "--" + name.replace("_", "-")
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        settings["help"] = f"{help_text} (default: {_shown(default)})".replace("%", "%%")
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings |= _reading(kind, field.name)
        # Lists may be named by one of their things: --dataset mnist svhn.
        one = [flag.removesuffix("s")] if get_origin(kind) is tuple and flag.endswith("s") else []
        parser.add_argument(flag, *one, **settings)


def _reading(kind: Any, name: str) -> dict[str, Any]:
    if get_origin(kind) is tuple:
        one = name.removesuffix("s")
        return {"nargs": "+", **_reading(get_args(kind)[0], one), "metavar": one.upper()}
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
        return _reading(kind, name)
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"type": kind, "metavar": "N" if kind is int else name.upper()}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def given(options: argparse.Namespace, config: type[Any], prefix: str = "") -> dict[str, Any]:
    """What of a configuration was given on the command line, nested as the dataclass is."""
    found: dict[str, Any] = {}
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        name = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            inner = given(options, hints[field.name], f"{name}_")
            if inner:
                found[field.name] = inner
        elif hasattr(options, name):
            value = getattr(options, name)
            found[field.name] = tuple(value) if isinstance(value, list) else value
    return found


def from_json(config: type[T], values: Any, where: str) -> T:
    """The configuration that ``dataclasses.asdict`` gave, checked field by field."""
    if not isinstance(values, Mapping):
        raise PathError(f"{where}: expected an object with the fields of {config.__name__}")
    hints = get_type_hints(config)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise PathError(f"{where}: unknown field {unknown[0]!r} (known: {', '.join(hints)})")
    found = {}
    for name, value in values.items():
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            found[name] = from_json(kind, value, f"{where}: {name}")  # type: ignore[arg-type]
        else:
            found[name] = _checked(kind, value, f"{where}: {name}")
    try:
        return config(**found)
    except TypeError as error:
        raise PathError(f"{where}: {str(error).split('__init__() ')[-1]}") from None


def _checked(kind: Any, value: Any, where: str) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise PathError(f"{where}: expected a list, found {value!r}")
        return tuple(_checked(get_args(kind)[0], one, where) for one in value)
    if get_origin(kind) in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        (kind,) = (one for one in get_args(kind) if one is not type(None))
        return _checked(kind, value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise PathError(f"{where}: expected one of {', '.join(get_args(kind))}, found {value!r}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PathError(f"{where}: expected {kind.__name__}, found {value!r}")
    return value


def merged(config: T, changes: Mapping[str, Any]) -> T:
    """The same with these fields changed, nested ones too."""
    flat = {
        name: merged(getattr(config, name), value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(config, **flat)  # type: ignore[type-var]
