"""A norm on a GPU as one CUDA graph: hundreds of small kernels for the price of one launch.

A norm that is measured again and again, of weights that stay where they are, is captured and replayed. The
numbers are those of the eager call, kernel by kernel, and each call checks their range as that does. A norm
that is differentiated is computed eagerly, but for its range, which a replay checks: a third of its calls.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Collection, Hashable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pathsgd._torch import are_plain, is_capturing
from pathsgd.geometry.cuda_graph import ERROR_MODE, CUDAGraph
from pathsgd.geometry.devices import on_device
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.passes import PoweredNetwork, powered_network
from pathsgd.geometry.precision import full_precision
from pathsgd.geometry.range_check import Looked, Measure, RangeCheck, measure_in_range
from pathsgd.graph.path_graph import PathGraph

WARM_UP = 3
"""Calls alike before the norm is captured: a capture takes longer than several of them."""

MOST_ENTRIES = 1 << 26
"""Of the parameters and units of a captured network. A capture keeps the memory that the norm is computed in,
for powers of weights and path weights of units: some 256 MiB at most in fp32. In larger networks launching
kernels counts for less."""

MOST_KINDS = 8
"""Kinds of calls that are remembered for a graph, as by p and by region. They are computed in the same
memory."""


@dataclass
class CapturedNorm:
    """A norm of one model in plain floats. Holds no tensor of the model."""

    passes: CUDAGraph
    found: list[Tensor]
    extremes: Tensor
    looked: list[Looked]

    def replay(self, network: PoweredNetwork) -> list[Tensor] | None:
        """The norm of the weights as they are now; None if plain floats are not enough."""
        self.passes.replay()
        found = [value.clone() for value in self.found]
        # The host waits here for the copies, too: another stream may write what they were made from.
        return found if self.is_in_range(network) else None

    def is_in_range(self, network: PoweredNetwork) -> bool:
        """Whether plain floats were enough in the last replay."""
        extremes = self.extremes.tolist()
        with full_precision(network.device):
            return RangeCheck(network, self.looked).accepts(extremes)


@torch.no_grad()
def capture(
    network: PoweredNetwork, measure: Measure[list[Tensor]], beside: CapturedNorm | None
) -> CapturedNorm | None:
    """The norm of one model, measured once eagerly before in this thread; None if there is nothing to check.
    It shares its memory with another one, which is not replayed at the same time."""
    passes, check = CUDAGraph(), RangeCheck(network)
    pool = None if beside is None else beside.passes.pool()
    stream = _capture_stream(network.device)
    with (
        full_precision(network.device),
        torch.cuda.graph(passes, pool=pool, stream=stream, capture_error_mode=ERROR_MODE),
    ):
        found = measure(network, check)
        extremes = check.extremes() if check.looked else None
    return None if extremes is None else CapturedNorm(passes, found, extremes, check.looked)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: cuBLAS keeps a workspace for every stream. No other captures use this one, as those of
    optimizers, which are replayed beside."""
    return torch.cuda.Stream(device)


@dataclass
class _Calls:
    """Calls of one kind."""

    places: object = None
    """Where the tensors lay in the last call."""
    alike: int = 0
    """How many calls in a row found them there."""
    captured: CapturedNorm | None = None
    warm_up: int = WARM_UP


_calls: weakref.WeakKeyDictionary[PathGraph, dict[Hashable, _Calls]] = weakref.WeakKeyDictionary()

_lock = threading.Lock()
"""One for all graphs, which share the workspace of their stream."""


def measure_again(
    graph: PathGraph, tensors: Tensors, p: float, options: Hashable, measure: Measure[list[Tensor]]
) -> list[Tensor]:
    """:func:`measure_in_range`, replayed if the last calls with these options were alike."""
    # A maximum has no kernel in torch: it is bound by its work, in more memory.
    if math.isinf(p) or not _is_capturable(tensors.values()) or not _lock.acquire(blocking=False):
        return measure_in_range(graph, tensors, p, measure)
    try:
        calls = _find_calls(graph, tensors, (float(p), options, *_settings()))
        is_differentiated = not are_plain(list(tensors.values()))
        with torch.no_grad():
            network = powered_network(graph, tensors, p)
        if calls.captured is not None:
            with on_device(network.device):
                if not is_differentiated:
                    found = calls.captured.replay(network)
                else:
                    calls.captured.passes.replay()
                    found = measure_in_range(graph, tensors, p, measure, exponents=False)
                    found = found if calls.captured.is_in_range(network) else None
            return measure_in_range(graph, tensors, p, measure, exponents=True) if found is None else found
        found = measure_in_range(graph, tensors, p, measure)
        calls.alike += 1
        if calls.alike == calls.warm_up and _count_entries(graph) <= MOST_ENTRIES:
            calls.warm_up *= 2  # weights that keep moving are not captured every time
            beside = next((each.captured for each in _calls[graph].values() if each.captured), None)
            if is_differentiated:  # by other kernels: those of the capture are compiled before it
                with torch.no_grad():
                    measure_in_range(graph, tensors, p, measure)
            # The norm is known already: what ends a capture, as too little memory, is no reason to fail.
            with on_device(network.device), suppress(RuntimeError):
                calls.captured = capture(network, measure, beside)
        return found
    finally:
        _lock.release()


def _find_calls(graph: PathGraph, tensors: Tensors, kind: Hashable) -> _Calls:
    """Those of this kind before, without their capture if a tensor has moved."""
    kinds = _calls.setdefault(graph, {})
    calls = kinds[kind] = kinds.pop(kind, _Calls())  # the first one is the longest ago
    if len(kinds) > MOST_KINDS:
        del kinds[next(iter(kinds))]
    places = {name: (t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in tensors.items()}
    if calls.places != places:
        calls.places, calls.alike, calls.captured = places, 0, None
    return calls


def _settings() -> tuple[object, ...]:
    """What else kernels are chosen by."""
    cudnn, fixed = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    return torch.get_default_dtype(), cudnn.enabled, cudnn.deterministic, fixed


def _is_capturable(tensors: Collection[Tensor]) -> bool:
    """Whether all are on one GPU, and nothing traces, transforms or captures their use."""
    device = next(iter(tensors)).device
    return (
        device.type == "cuda"
        and not is_capturing()
        and _are_plain_values(tensors)
        and {type(tensor) for tensor in tensors} <= {Tensor, nn.Parameter}
        and all(tensor.device == device and tensor.layout is torch.strided for tensor in tensors)
    )


@torch.no_grad()
def _are_plain_values(tensors: Collection[Tensor]) -> bool:
    """Whether they are plain but for being differentiated."""
    return are_plain(list(tensors))


def _count_entries(graph: PathGraph) -> int:
    """Of all parameters, and of all units that are computed."""
    shapes = [info.shape for info in graph.parameters.values()]
    return sum(map(math.prod, [*shapes, *(node.shape for node in graph.folded.graph.nodes)]))
