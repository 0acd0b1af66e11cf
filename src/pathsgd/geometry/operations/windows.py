"""The matrices of fixed edges along one axis: pooling, padding, gathering, resizing."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pathsgd.geometry.scaled import Arithmetic
from pathsgd.graph.nodes import Window


@functools.cache
def window_powers(window: Window, adjoint: bool, arithmetic: Arithmetic, device: torch.device) -> Tensor:
    """``|A[o, i]|^p``, with A the weight of the edge from entry i to entry o; its transpose for the adjoint.
    Kept, so that a step copies nothing, and for good: a captured CUDA graph may read it."""
    with torch.inference_mode(False):  # else nothing outside of it could keep it for a backward pass
        powers = arithmetic.power(_matrix(window).to(device))
        return powers.t() if adjoint else powers


@functools.cache
def window_index(window: Window, device: torch.device) -> Tensor:
    """The entries that are gathered. Kept likewise."""
    with torch.inference_mode(False):
        return torch.tensor(window.index, dtype=torch.int64, device=device)


def _matrix(window: Window) -> Tensor:
    matrix = torch.zeros(window.out, window.size, dtype=torch.float64)
    if window.kind == "gather":
        for o, i in enumerate(window.index):
            if i >= 0:
                matrix[o, i] = 1
        return matrix
    if window.kind == "resize":
        return _linear_interpolation(window, matrix)
    for o in range(window.out):
        entries, divisor = _window(window, o)
        for i in entries:
            matrix[o, i] = 1 / divisor if window.kind.endswith("mean") else 1
    return matrix


def _window(window: Window, o: int) -> tuple[list[int], int]:
    """The entries that feed output o, and what average pooling divides by."""
    n = window.size
    if window.kind.startswith("adaptive"):
        entries = list(range(o * n // window.out, -(-(o + 1) * n // window.out)))
        return entries, len(entries)
    start = o * window.stride - window.padding
    places = [start + k * window.dilation for k in range(window.kernel)]
    entries = [i for i in places if 0 <= i < n]
    if window.count_include_pad:
        return entries, min(start + window.kernel, n + window.padding) - start
    return entries, len(entries)


def _linear_interpolation(window: Window, matrix: Tensor) -> Tensor:
    n, out = window.size, window.out
    for o in range(out):
        if window.align_corners:
            place = o * (n - 1) / (out - 1) if out > 1 else 0.0
        else:
            assert window.ratio is not None
            place = max((o + 0.5) * window.ratio - 0.5, 0.0)
        low = min(int(place), n - 1)
        high = min(low + 1, n - 1)
        matrix[o, low] += 1 - (place - low)
        matrix[o, high] += place - low
    return matrix
