"""A typed dataclass as the options of a command, read by tyro.

The docstring of the dataclass is the description that ``--help`` prints, the docstring under a field is the
help of its option.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import tyro

from pathsgd.errors import PathError

T = TypeVar("T")

MARKERS = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)


def parse(config: type[T], arguments: Sequence[str], command: str, default: T | None = None) -> T:
    """Reads the options of a command. Wrong ones end the process with exit code 2 and a message.

    Args:
        config: A dataclass with a docstring under every field.
        arguments: What follows the command on the command line.
        command: The name of the command.
        default: Values of the options that are not given.

    Raises:
        PathError: The dataclass refuses the values.
    """
    if "--help" in arguments or "-h" in arguments:
        print(inspect.getdoc(config), end="\n\n")  # tyro would join its lines
    given: dict[str, Any] = {} if default is None else {"default": default}
    with _raise_path_errors():
        return tyro.cli(
            config, prog=f"pathsgd {command}", description="", args=arguments, config=MARKERS, **given
        )


def parse_known(config: type[T], arguments: Sequence[str], command: str) -> T:
    """Reads the options that the defaults of others depend on, and ignores the others."""
    with _raise_path_errors():
        found, _ = tyro.cli(
            config, prog=f"pathsgd {command}", args=arguments, config=MARKERS, return_unknown_args=True,
            add_help=False,
        )  # fmt: skip
        return found


@contextlib.contextmanager
def _raise_path_errors() -> Iterator[None]:
    """Raises the PathError of a dataclass, which tyro would print as a box before it exits."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as stop:
        cause = stop.__context__
        while cause is not None:
            if isinstance(cause, PathError):
                raise cause from None
            cause = cause.__context__
        print(printed.getvalue(), end="", file=sys.stderr)
        raise
