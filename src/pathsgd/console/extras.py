"""Packages that only some commands need."""

from __future__ import annotations

import importlib
from typing import Any

from pathsgd.errors import PathError


def optional(module: str, purpose: str) -> Any:
    """A module of the extra `paper`, imported when something needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise PathError(f"{purpose} needs {name}: pip install 'pathsgd[paper]'") from error
