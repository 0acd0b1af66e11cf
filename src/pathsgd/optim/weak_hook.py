"""Hooks that tell an object of ours what a model does."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class WeakHook:
    """It hangs on the model, so it must not own an owner that owns the model; in a copy of the model it does
    nothing."""

    def __init__(self, owner: Any = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph break, as any hook of Python is
    def __call__(self, *arguments: Any) -> None:
        owner = None if self.owner is None else self.owner()
        if owner is not None:
            self.tell(owner, *arguments)

    def tell(self, owner: Any, *arguments: Any) -> None:
        """What the owner is told of a pass."""
        raise NotImplementedError

    def __deepcopy__(self, memo: Any) -> WeakHook:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()
