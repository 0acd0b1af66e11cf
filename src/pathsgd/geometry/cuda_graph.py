"""CUDA graphs that come and go without disturbing what the user captures."""

from __future__ import annotations

import ctypes
import functools
import sys

import torch

ERROR_MODE = "thread_local"
"""Other threads, as those of a data loader, may allocate during the capture."""

_late: list[CUDAGraph] = []


class CUDAGraph(torch.cuda.CUDAGraph):
    """torch's, but not destroyed while another one is captured, which would end that capture: an optimizer
    with a learning rate schedule refers to itself, and is freed whenever the garbage collector runs."""

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if torch.cuda.is_current_stream_capturing():
            _late.append(self)
        else:
            _late.clear()


def find_capture(stream: torch.cuda.Stream | None = None) -> int:
    """The number of the capture that a stream, by default the current one, takes part in, or 0."""
    stream = stream or torch.cuda.current_stream()
    status, number = ctypes.c_int(), ctypes.c_uint64()
    driver().cuStreamGetCaptureInfo(
        ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status), ctypes.byref(number)
    )
    return number.value if status.value else 0


@functools.cache
def driver() -> ctypes.CDLL:
    """Of CUDA, for what torch does not offer."""
    return ctypes.CDLL("libcuda.so.1")
