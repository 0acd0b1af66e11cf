"""The exceptions this library raises on purpose. All of them are ValueErrors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


class PathError(ValueError):
    """A path quantity cannot be computed as asked; the message says what to do instead.

    Example:
        >>> import pathsgd, torch
        >>> pathsgd.path_norm(torch.nn.Linear(2, 1), torch.ones(1, 2), p=0.5)
        Traceback (most recent call last):
        pathsgd.errors.PathError: Invalid p: 0.5 (path norms need 1 <= p <= inf)
    """


class TraceError(PathError):
    """A model cannot be turned into a PathGraph.

    Example:
        >>> import pathsgd, torch
        >>> pathsgd.trace(torch.nn.ReLU(), torch.ones(1, 2))
        Traceback (most recent call last):
        pathsgd.errors.TraceError: ReLU has no parameters: there is nothing to trace
    """


class DataDependentError(TraceError):
    """A model's computation depends on values in a way that torch.export cannot follow.

    Example:
        >>> import pathsgd, torch
        >>> class Branches(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) if x.sum() > 0 else x
        >>> pathsgd.trace(Branches(2, 2), torch.ones(1, 2))
        Traceback (most recent call last):
        pathsgd.errors.DataDependentError: tracing failed in Branches: ...
    """

    module: object = None
    """The module inside the model in which it is so, if it is known."""


class RescaleError(PathError):
    """A rescaling names a unit that does not exist or cannot be rescaled.

    Example:
        >>> import pathsgd, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> pathsgd.rescale(model, None, {("0", 3): 2.0})
        Traceback (most recent call last):
        pathsgd.errors.RescaleError: '0' has units 0 to 2; there is no unit 3
    """


LARGEST_P = 64
"""Beyond it powers of ordinary weights leave fp64, and phi_p is within a few percent of phi_inf."""


def check_p(p: object) -> float:
    """The order of a norm over weights, checked."""
    if not isinstance(p, (int, float)) or not p >= 1:
        raise PathError(f"Invalid p: {p} (path norms need 1 <= p <= inf)")
    if LARGEST_P < p < math.inf:
        raise PathError(f"Invalid p: {p} (p over {LARGEST_P} is beyond floats; use math.inf)")
    return float(p)


def check_state(state_dict: Mapping[str, Any], options: Iterable[str]) -> None:
    """Refuses the state of an optimizer whose groups do not have all of these options."""
    for name in options:
        if not all(name in group for group in state_dict["param_groups"]):
            raise ValueError(
                f"this is the state of another optimizer: its groups have no {name!r}; begin without a state"
            )
