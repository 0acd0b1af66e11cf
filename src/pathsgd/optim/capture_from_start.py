"""In a CUDA graph that a user captures: what depends on the weights alone, beside everything captured before.

A step is captured after the forward and backward pass, and on its stream would wait for them. The passes over
the weights need not: in the graph they get no dependency, so that they run from its beginning.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Use = Literal["passes", "tables"]
"""Of a second stream: passes over the weights, or tables of addresses copied to the device."""
SET_DEPENDENCIES = 1
"""CU_STREAM_SET_CAPTURE_DEPENDENCIES: in place of those there are."""


@contextmanager
def capture_from_start(device: torch.device, use: Use = "passes") -> Iterator[None]:
    """What is launched inside is captured on a second stream, without waiting for what was captured before,
    other than for the same use: memory that it has freed is given out again. What is captured after it waits
    for it. For work on tensors that nothing captured before has written."""
    side, current = _side_stream(device, use), torch.cuda.current_stream(device)
    if not _is_capturing(side):
        side.wait_stream(current)  # which makes it part of the capture
        # If a driver refuses, the work waits as it would have done.
        _driver().cuStreamUpdateCaptureDependencies(
            ctypes.c_void_p(side.cuda_stream), None, ctypes.c_size_t(0), ctypes.c_uint(SET_DEPENDENCIES)
        )
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


@contextmanager
def capture_after(event: torch.cuda.Event, device: torch.device) -> Iterator[None]:
    """The same, but it waits for what was captured before the event."""
    side = _side_stream(device, "passes")
    side.wait_event(event)
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream(device).wait_stream(side)


@functools.cache
def _side_stream(device: torch.device, use: Use) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
