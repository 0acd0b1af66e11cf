"""Peak memory of what a function allocates, by counting the storages torch hands out while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class StorageMeter(TorchDispatchMode):
    """Counts bytes of live storages made inside. Scratch space inside an operator is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(x, Tensor):
                self.known.add(x.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self._count(x)
        return result

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        self.known.discard(key)


def peak_bytes(function: Callable[[], object]) -> int:
    with StorageMeter() as meter:
        function()
    return meter.peak


def kept_bytes(function: Callable[[], object]) -> int:
    """What is still alive at the end: after a forward pass, the activations kept for the backward."""
    with StorageMeter() as meter:
        result = function()
        live = meter.live
        del result
    return live
