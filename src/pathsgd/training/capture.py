"""CUDA graphs: everything that is captured and replayed, by optimizers and by ``path_norm``.

Hundreds of small kernels cost one launch when they are replayed. A graph reads its tensors where they lay
when it was captured. What may move between steps, as gradients do, is therefore reached through a table of
addresses on the device (:class:`AddressTable`).
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pathsgd._torch import are_plain, is_capturing

WARM_UP = 3
"""Runs before something is captured: kernels are compiled then, and a capture takes longer than several."""

MAX_KINDS = 8
"""Kinds of calls whose graphs are kept for one owner, as by p and by region."""

ERROR_MODE = "thread_local"
"""Other threads, as those of a data loader, may allocate during the capture."""

T = TypeVar("T")


@functools.cache
def has_triton() -> bool:
    """Whether Triton is there: builds of torch for GPUs bring it along, but on Windows."""
    return importlib.util.find_spec("triton") is not None


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Inside, this is the current GPU, as Triton and CUDA graphs want it; for a CPU nothing changes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# Graphs and pinned memory that come and go without disturbing what the user captures

_late: list[object] = []


class CUDAGraph(torch.cuda.CUDAGraph):
    """torch's, but not destroyed while another one is captured, which would end that capture: an optimizer
    with a learning rate schedule refers to itself, and is freed whenever the garbage collector runs."""

    def __del__(self) -> None:
        _free(self)


def capture(launch: Callable[[], T], device: torch.device) -> tuple[CUDAGraph, T]:
    """A graph of what is launched, and what ``launch`` returned: tensors that every replay writes."""
    graph = CUDAGraph()
    with on_device(device), torch.cuda.graph(graph, capture_error_mode=ERROR_MODE):
        result = launch()
    return graph, result


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


class AddressTable:
    """Rows of integers on a device, the first of which are addresses.

    Args:
        fields: the rows; the columns of addresses are written by :meth:`point`.
        device: where kernels read them.
    """

    def __init__(self, fields: Tensor, device: torch.device) -> None:
        self.fields, self.device = fields, device
        self.on_device = fields.to(device)
        self._addresses: list[int] | None = None
        self._captured: list[Tensor] = []
        free_after_capture(self, self._captured)

    def point(self, addresses: Sequence[int], columns: int, by_row: Callable[[Tensor], Tensor]) -> None:
        """Writes where everything lies now, if that has changed.

        Args:
            addresses: so many for each tensor.
            columns: how many.
            by_row: the first columns of every row from the addresses by tensor.
        """
        if addresses == self._addresses and not is_capturing():
            return
        fields = torch.empty(self.fields.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        fields.copy_(self.fields)
        fields[:, :columns] = by_row(torch.tensor(addresses).view(-1, columns))
        self.on_device.copy_(fields, non_blocking=True)
        if is_capturing():
            self._captured.append(fields)  # a replay copies it again
        self._addresses = None if is_capturing() else list(addresses)


# Functions of a model's weights, called again and again

_calls: weakref.WeakKeyDictionary[object, dict[Hashable, _Calls]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Calls:
    """Calls of one kind: where tensors lay, how often they lay there, and the graph if it was captured."""

    def __init__(self) -> None:
        self.places: object = None
        self.alike = 0
        self.captured: tuple[CUDAGraph, Any] | None = None


def replay_calls(
    owner: object,
    tensors: Mapping[str, Tensor],
    options: Hashable,
    compute: Callable[[], tuple[list[Tensor], T]],
) -> tuple[list[Tensor], T]:
    """``compute()`` of tensors on a GPU, replayed once the last calls with these options were alike.

    Args:
        owner: what the calls belong to; they are forgotten with it.
        tensors: what is read.
        options: what else the result depends on.
        compute: returns its results and something that holds other tensors, which replays write as well.
    """
    if not _can_be_captured(tensors) or not _lock.acquire(blocking=False):
        return compute()
    try:
        kinds = _calls.setdefault(owner, {})
        calls = kinds[options] = kinds.pop(options, _Calls())
        if len(kinds) > MAX_KINDS:
            del kinds[next(iter(kinds))]
        places = [(t.data_ptr(), t.dtype, t.stride()) for t in tensors.values()]
        if calls.places != places:
            calls.places, calls.alike, calls.captured = places, 0, None
        calls.alike += 1
        if calls.captured is None and calls.alike > WARM_UP:
            calls.captured = capture(compute, next(iter(tensors.values())).device)
        if calls.captured is None:
            return compute()
        graph, captured_results = calls.captured
        graph.replay()
        results, others = captured_results
        return [result.clone() for result in results], others
    finally:
        _lock.release()


def _can_be_captured(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all are on one GPU, and nothing differentiates, traces, transforms or captures their use."""
    values = list(tensors.values())
    device = values[0].device
    return (
        device.type == "cuda"
        and not is_capturing()
        and are_plain(values)
        and all(type(t) in (Tensor, nn.Parameter) and t.device == device for t in values)
    )
