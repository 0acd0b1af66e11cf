"""Streams for runs that share a GPU.

Two runs at a time must never record their steps on the same stream. cuBLAS keeps one workspace for each
thread and stream it is recorded on, and the backward pass of all runs is one thread: steps recorded on one
stream would use one workspace, and write into each other's sums when they are replayed side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FREE: dict[torch.device, list[tuple[torch.cuda.Stream, torch.cuda.Stream]]] = {}
_LOCK = threading.Lock()


@contextmanager
def own_streams(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Inside, work goes to a stream that no other run uses; another one, to record steps on, is given."""
    if device.type != "cuda":
        yield None
        return
    with _LOCK:
        free = _FREE.setdefault(device, [])
        # torch deals 32 streams of each priority round and round; those of high priority nobody else takes.
        pair = free.pop() if free else (torch.cuda.Stream(device, -1), torch.cuda.Stream(device, -1))
    current, recording = pair
    try:
        current.wait_stream(torch.cuda.current_stream(device))  # it may still be copying the data
        with torch.cuda.stream(current):
            yield recording
    finally:
        with _LOCK:
            free.append(pair)
