"""gamma on a GPU as one CUDA graph: hundreds of small kernels for the price of one launch.

The passes over the weights are bound by launching kernels, not by their work. The weights stay where they are
while a network is trained, so the passes can be captured once and replayed.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

from pathsgd.geometry.cuda_graph import ERROR_MODE, CUDAGraph, free_after_capture
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.passes import powered_network
from pathsgd.geometry.precision import full_precision
from pathsgd.geometry.range_check import Measure, RangeCheck, Suspects, is_due
from pathsgd.graph.path_graph import PathGraph
from pathsgd.optim.model_tensors import addresses

T = TypeVar("T")


class CapturedMeasurement(Generic[T]):
    """What ``measure`` finds of one model at one p, in plain floats; measured once eagerly before."""

    @torch.no_grad()
    def __init__(self, graph: PathGraph, tensors: Tensors, p: float, measure: Measure[T]) -> None:
        self._tensors, self._addresses = tensors, addresses(tensors)
        self.passes, self.checked_passes = CUDAGraph(), CUDAGraph()
        with full_precision(next(iter(tensors.values())).device):
            with torch.cuda.graph(self.passes, capture_error_mode=ERROR_MODE):
                self.found = measure(powered_network(graph, tensors, p), None)
            # A second graph with a range check, which takes twice as long and is replayed now and then.
            with torch.cuda.graph(
                self.checked_passes, pool=self.passes.pool(), capture_error_mode=ERROR_MODE
            ):
                network = powered_network(graph, tensors, p)
                self.check = RangeCheck(network)
                measure(network, self.check)
                self.extremes = self.check.extremes() if self.check.looked else None
        self.seen = None
        if self.extremes is not None:
            self.seen = torch.empty(self.extremes.shape, dtype=self.extremes.dtype, pin_memory=True)
            free_after_capture(self, self.seen)
        self._usual: Suspects | None = None
        self._replays = 0
        self._stream: torch.cuda.Stream | None = None
        self._ahead: T | None = None

    def fits(self, tensors: Tensors) -> bool:
        """Whether these, just read of the model, lie where they lay when the graph was captured."""
        return tensors is self._tensors or self._addresses == addresses(tensors)

    def replay(self, check: bool = False) -> T | None:
        """What is found of the weights as they are now, in the same tensors each time. None if plain floats
        may not be enough any more: measure eagerly then. ``check``: more than a step has written the weights,
        so that this must be known at once."""
        self.passes.replay()
        if self.extremes is not None and not self._in_range(check):
            return None
        self._replays += 1
        return self.found

    def start(self, check: bool = False) -> None:
        """Begins to measure the weights as they are now, beside whatever is launched after."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            weakref.finalize(self, _wait_on_host, self._stream).atexit = False
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._ahead = self.replay(check)

    def finish(self) -> T | None:
        """What was begun to be measured. To be waited for even if it is of no use any more: the next
        measurement is written into the same tensors."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._ahead

    def _in_range(self, check: bool) -> bool:
        assert self.extremes is not None
        assert self.seen is not None
        if check or self._replays == 0 or not self.check.has_room:
            self.checked_passes.replay()
            self.seen.copy_(self.extremes)
            suspects = self.check.suspects(self.seen.tolist())
            if self._replays == 0:
                # The eager measurement before was checked fully: what is suspect now is a dead unit, and may
                # be.
                self._usual = suspects
        elif is_due(self._replays):
            # Without waiting for the device: this reads what the check before this one copied.
            suspects = self.check.suspects(self.seen.tolist())
            self.checked_passes.replay()
            self.seen.copy_(self.extremes, non_blocking=True)
        else:
            return self._usual is not None
        return suspects is not None and self._usual is not None and _places(suspects) <= _places(self._usual)


def _places(suspects: Suspects) -> set[tuple[int, bool]]:
    return {(k, forward) for k, forward, _ in suspects}


def _wait_on_host(stream: torch.cuda.Stream) -> None:
    """What a graph under way reads is free with the model, and is not to be written over before it ends: an
    index that is out of bounds ends the process."""
    if not torch.cuda.is_current_stream_capturing():
        stream.synchronize()
