"""The moment in which a backward pass begins, for what can be computed beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pathsgd.optim.weak_hook import WeakHook


class BackwardStart:
    """Calls ``owner.on_backward()`` when the gradient of the last parameter is known: in most networks that
    is the first one. The forward pass is over then, and has written running statistics.

    A compiled network hands out all gradients at the end: if the optimizer was given what ``torch.compile``
    returned, ``owner.on_forward()`` is called when that has run.
    """

    def __init__(self, owner: Any, compiled: nn.Module | None) -> None:
        self._hook = _Begun(owner)
        self._parameter: Tensor | None = None
        self._handle: RemovableHandle | None = None
        if compiled is not None:
            compiled.register_forward_hook(_HasRun(owner))

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watches backward passes to these parameters."""
        last = next((p for p in reversed([*parameters]) if p.requires_grad), None)
        if last is self._parameter:
            return
        if self._handle is not None:
            self._handle.remove()
        self._parameter = last
        self._handle = None if last is None else last.register_hook(self._hook)


class _Begun(WeakHook):
    def tell(self, owner: Any, *arguments: Any) -> None:
        owner.on_backward()


class _HasRun(WeakHook):
    def tell(self, owner: Any, *arguments: Any) -> None:
        if torch.is_grad_enabled() and owner.model.training:
            owner.on_forward()
