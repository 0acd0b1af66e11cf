"""The exceptions this library raises on purpose. All of them are ValueErrors."""

from __future__ import annotations


class PathError(ValueError):
    """Something asked of the path geometry cannot be done; the message says what to do instead."""


class TraceError(PathError):
    """The model could not be turned into a PathGraph."""


class RescaleError(PathError):
    """A rescaling names a unit that does not exist or cannot be rescaled."""
