"""In a CUDA graph that a user captures: work that depends on the weights alone runs from its beginning, in
parallel with the forward and backward pass.

A step is captured after these, and on their stream would wait for them. In the graph the passes over the
weights get no dependency on them.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pathsgd.geometry.cuda_graph import free_after_capture

MOST_STREAMS = 64
SET_DEPENDENCIES = 1
"""CU_STREAM_SET_CAPTURE_DEPENDENCIES: in place of those there are."""


@contextmanager
def capture_from_start(device: torch.device, owner: object) -> Iterator[None]:
    """What is launched inside is captured on a second stream, without waiting for what was captured before,
    other than by the same owner; what is captured after it waits for it. For work on tensors that nothing
    captured before has written.

    Memory allocated inside belongs to that stream: a result must not be freed before the owner's next work
    there waits for those who read it.
    """
    current = torch.cuda.current_stream(device)
    with _lock:
        side, is_new = _find_side_stream(current, owner)
        if is_new:
            side.wait_stream(current)  # which makes it part of the capture
            # If a driver refuses, the work waits as it would have done.
            _driver().cuStreamUpdateCaptureDependencies(
                ctypes.c_void_p(side.cuda_stream), None, ctypes.c_size_t(0), ctypes.c_uint(SET_DEPENDENCIES)
            )
    with _on(side, current):
        yield


@contextmanager
def capture_after(event: torch.cuda.Event, device: torch.device, owner: object) -> Iterator[None]:
    """The same, but it waits for what was captured before the event."""
    current = torch.cuda.current_stream(device)
    with _lock:
        side, _ = _find_side_stream(current, owner)
        side.wait_event(event)
    with _on(side, current):
        yield


@contextmanager
def _on(side: torch.cuda.Stream, current: torch.cuda.Stream) -> Iterator[None]:
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        current.wait_stream(side)  # a capture ends with all its streams joined


class CapturedCopies:
    """Copies from the host that a graph makes when its replay begins. To be kept as long as the graph is."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        free_after_capture(self, self._kept)

    def place(self, values: Tensor, device: torch.device) -> Tensor:
        """A copy of the values on the device."""
        pinned = values.pin_memory()
        with capture_from_start(device, self):
            placed = pinned.to(device, non_blocking=True)
        # Every replay reads the one, and writes the other at its beginning: nothing that was captured before
        # may lie there.
        self._kept += [pinned, placed]
        return placed


_lock = threading.Lock()
_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
_owned: weakref.WeakKeyDictionary[object, tuple[torch.cuda.Stream, int]] = weakref.WeakKeyDictionary()
"""By owner, its second stream and the capture in which it is that. Owners never share one in a capture: torch
gives memory that one has freed to the other, which does not wait for what is still to read it."""


def _find_side_stream(current: torch.cuda.Stream, owner: object) -> tuple[torch.cuda.Stream, bool]:
    """The owner's in this capture, and whether it has captured nothing yet."""
    capture = _find_capture(current)
    side, of = _owned.get(owner, (current, 0))
    if of == capture:
        return side, False
    free = _find_free_stream(current.device)
    if free is None:
        return current, False  # the work waits as it would have done
    _owned[owner] = free, capture
    return free, True


def _find_free_stream(device: torch.device) -> torch.cuda.Stream | None:
    """One that takes part in no capture. torch gives out the same ones again after some."""
    streams = _streams.setdefault(device, [])
    for k in range(MOST_STREAMS):
        if k == len(streams):
            streams.append(torch.cuda.Stream(device))
        if not _find_capture(streams[k]):
            return streams[k]
    return None


def find_capture() -> int:
    """The number of the capture that the current stream takes part in, or 0."""
    return _find_capture(torch.cuda.current_stream())


def _find_capture(stream: torch.cuda.Stream) -> int:
    status, number = ctypes.c_int(), ctypes.c_uint64()
    _driver().cuStreamGetCaptureInfo(
        ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status), ctypes.byref(number)
    )
    return number.value if status.value else 0


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
