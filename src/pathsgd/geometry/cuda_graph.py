"""CUDA graphs that come and go without disturbing what the user captures."""

from __future__ import annotations

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
