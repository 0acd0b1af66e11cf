"""Packages that only some commands need."""

from __future__ import annotations

import importlib
from typing import Any

from pathsgd.errors import PathError


def import_optional(module: str, purpose: str) -> Any:
    """Imports a module of the extra ``paper`` when it is needed.

    Raises:
        PathError: It is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise PathError(f"{purpose} needs {name}: pip install 'pathsgd[paper]'") from error
