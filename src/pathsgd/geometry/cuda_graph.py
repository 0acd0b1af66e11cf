"""CUDA graphs and pinned memory that come and go without disturbing what the user captures."""

from __future__ import annotations

import sys
import weakref

import torch

from pathsgd._torch import is_capturing

ERROR_MODE = "thread_local"
"""Other threads, as those of a data loader, may allocate during the capture."""

_late: list[object] = []


class CUDAGraph(torch.cuda.CUDAGraph):
    """torch's, but not destroyed while another one is captured, which would end that capture: an optimizer
    with a learning rate schedule refers to itself, and is freed whenever the garbage collector runs."""

    def __del__(self) -> None:
        _free(self)


def free_after_capture(owner: object, pinned: object) -> None:
    """Pinned memory of the owner's, or a list of it, is not freed while a graph is captured either. torch
    would record an event into the capture, and fail to ask for it whenever another one begins."""
    weakref.finalize(owner, _free, pinned).atexit = False


def _free(what: object) -> None:
    if sys.is_finalizing():
        return
    if is_capturing():
        _late.append(what)
    else:
        _late.clear()
