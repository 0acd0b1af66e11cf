"""The moment in which a backward pass begins, for what can be computed beside it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pathsgd.optim.weak_hook import WeakHook


class BackwardStart:
    """Calls ``owner.on_backward(last)`` when the gradient of the last parameter is known: in most networks
    that is the first one. The forward pass is over then, and has written running statistics. ``last`` is
    whether as many backward passes have begun as before the last step: gradients of several batches may be
    added up.

    A compiled network hands out all gradients at the end. If the optimizer was given what ``torch.compile``
    returned, the owner is called when that has run.
    """

    def __init__(self, owner: Any, compiled: nn.Module | None) -> None:
        self._owner = weakref.ref(owner)
        self._hook = _GradientKnown(self)
        self._parameter: Tensor | None = None
        self._handle: RemovableHandle | None = None
        self._count, self._usual_count = 0, 1
        self._told = False
        """Whether the owner has been told of this pass already."""
        if compiled is not None:
            handle = compiled.register_forward_hook(_HasRun(self))
            weakref.finalize(self, handle.remove).atexit = False

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watches backward passes to these parameters."""
        last = next((p for p in reversed([*parameters]) if p.requires_grad), None)
        if last is self._parameter:
            return
        if self._handle is not None:
            self._handle.remove()
        self._parameter = last
        self._handle = None if last is None else last.register_hook(self._hook)

    def after_step(self) -> None:
        """The next backward pass is the first one."""
        self._usual_count, self._count = max(self._count, 1), 0

    def on_run(self) -> None:
        """The compiled network has run."""
        self._begin()
        self._told = True

    def on_gradient(self) -> None:
        """The gradient of the last parameter is known."""
        if not self._told:
            self._begin()
        self._told = False

    def _begin(self) -> None:
        self._count += 1
        owner = self._owner()
        if owner is not None:
            owner.on_backward(self._count >= self._usual_count)


class _GradientKnown(WeakHook):
    def tell(self, owner: BackwardStart, *arguments: Any) -> None:
        owner.on_gradient()


class _HasRun(WeakHook):
    def tell(self, owner: BackwardStart, *arguments: Any) -> None:
        module = arguments[0]
        if torch.is_grad_enabled() and module.training:
            owner.on_run()
