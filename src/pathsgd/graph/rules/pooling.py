"""Pooling, padding, resizing and reductions: fixed edges along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pathsgd.graph.builder import Builder, Ends, Paths, Value
from pathsgd.graph.nodes import Shape, Window, number
from pathsgd.graph.rules.registry import Call, rule


def reduce_to(b: Builder, x: Paths, dims: Sequence[int] | None, shape: Shape, average: bool = False) -> Paths:
    """The sum or the mean over ``dims`` (all of them if empty), in the shape the operator returns."""
    old = b.shape(x)
    axes = sorted({d % len(old) for d in dims}) if dims else list(range(len(old)))
    y = b.reduce(x, axes) if axes else x
    count = math.prod(old[d] for d in axes)
    if average and count > 1:
        y = b.multiply(y, number(1 / count))
    return b.reshape(y, shape)


@rule("mean", "nanmean")
def mean(b: Builder, call: Call) -> Value:
    return reduce_to(b, call.paths("self"), call.get("dim"), call.shape, average=True)


@rule("sum", "nansum")
def total(b: Builder, call: Call) -> Value:
    return reduce_to(b, call.paths("self"), call.get("dim"), call.shape)


@rule("std", "var", ignores=("correction", "unbiased"))
def spread(b: Builder, call: Call) -> Value:
    """A standard deviation is positively homogeneous, a variance as a square is: weighted as the mean is."""
    x = call.paths("self")
    return reduce_to(b, b.square(x) if call.name == "var" else x, call.get("dim"), call.shape, average=True)


@rule("cumsum", "cummax", "cummin")
def cumulate(b: Builder, call: Call) -> list[Value]:
    """A sum over a window that reaches back to the start."""
    x = call.paths("self")
    n = call.shape[call["dim"]] if call.shape else 1
    window = Window("sum", n, n, kernel=n, padding=max(n - 1, 0))
    return [b.axis_map(x, call["dim"] % len(call.shape), window) if n > 1 else x]


def _axes(call: Call) -> int:
    return next(n for n in (1, 2, 3) if f"{n}d" in call.name)


def _per_axis(call: Call, name: str, default: Any) -> tuple[Any, ...]:
    value = call.get(name, default=default)
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * _axes(call) if len(value) == 1 else value


def _pool(b: Builder, call: Call, kind: str) -> Paths:
    x = call.paths("self")
    kernel = _per_axis(call, "kernel_size", 1)
    stride = _per_axis(call, "stride", kernel) if call.get("stride") else kernel
    padding = _per_axis(call, "padding", 0)
    dilation = _per_axis(call, "dilation", 1)
    first = len(call.shape) - _axes(call)
    for k in range(_axes(call)):
        size = b.shape(x)[first + k]
        window = Window(
            kind, size, call.shape[first + k], kernel[k], stride[k], padding[k], dilation[k],
            bool(call.get("count_include_pad", default=True)),
        )  # fmt: skip
        x = b.axis_map(x, first + k, window)
    return x


@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices",
      "max_pool2d_with_indices", "max_pool3d_with_indices")  # fmt: skip
def max_pool(b: Builder, call: Call) -> list[Value]:
    """Every input of the window is an incoming edge of weight 1: a sum, not a maximum."""
    return [_pool(b, call, "sum")]


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(b: Builder, call: Call) -> Value:
    divisor = call.get("divisor_override")
    if divisor is None:
        return _pool(b, call, "mean")
    return b.multiply(_pool(b, call, "sum"), number(1 / divisor))


def _adaptive(b: Builder, call: Call, kind: str) -> Paths:
    x = call.paths("self")
    first = len(call.shape) - _axes(call)
    for dim in range(first, len(call.shape)):
        x = b.axis_map(x, dim, Window(kind, b.shape(x)[dim], call.shape[dim]))
    return x


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
      "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")  # fmt: skip
def adaptive_avg_pool(b: Builder, call: Call) -> Value:
    return _adaptive(b, call, "adaptive_mean")


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(b: Builder, call: Call) -> list[Value]:
    return [_adaptive(b, call, "adaptive_sum")]


def zero_pad(b: Builder, x: Paths, dim: int, before: int, after: int) -> Paths:
    if not before and not after:
        return x
    n = b.shape(x)[dim]
    index = tuple(k if 0 <= k < n else -1 for k in range(-before, n + after))
    return b.axis_map(x, dim, Window("gather", n, len(index), index=index))


@rule("constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
      "replication_pad1d", "replication_pad2d", "replication_pad3d")  # fmt: skip
def pad(b: Builder, call: Call) -> Value:
    x = call.paths("self")
    amounts = call.get("pad", "padding")
    mode = call.get("mode", default="constant")
    mode = "reflect" if "reflect" in call.name else "replicate" if "replicat" in call.name else mode
    if mode == "constant" and (call.get("value", default=0) or 0) != 0:
        raise Ends("padding with a constant other than zero")
    for k in range(len(amounts) // 2):
        dim = len(call.shape) - 1 - k
        before, after = amounts[2 * k], amounts[2 * k + 1]
        n = b.shape(x)[dim]
        index = tuple(_source_place(j, n, mode) for j in range(-before, n + after))
        if index != tuple(range(n)):
            x = b.axis_map(x, dim, Window("gather", n, len(index), index=index))
    return x


def _source_place(j: int, n: int, mode: str) -> int:
    """Which entry stands at place ``j`` of a padded axis of ``n`` entries; -1 for none."""
    if 0 <= j < n:
        return j
    if mode == "reflect":
        return -j if j < 0 else 2 * (n - 1) - j
    if mode == "replicate":
        return 0 if j < 0 else n - 1
    if mode == "circular":
        return j % n
    return -1


@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
      "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
      "_upsample_nearest_exact3d")  # fmt: skip
def upsample_nearest(b: Builder, call: Call) -> Value:
    x = call.paths("input" if "input" in call.arguments else "self")
    exact = "exact" in call.name
    for axis, dim in enumerate(range(2, len(call.shape))):
        n, out = b.shape(x)[dim], call.shape[dim]
        index = _nearest_places(n, out, _factor(call, axis), exact)
        x = b.axis_map(x, dim, Window("gather", n, out, index=index))
    return x


@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def upsample_linear(b: Builder, call: Call) -> Value:
    x = call.paths("input" if "input" in call.arguments else "self")
    align = bool(call["align_corners"])
    for axis, dim in enumerate(range(2, len(call.shape))):
        n, out = b.shape(x)[dim], call.shape[dim]
        factor = _factor(call, axis)
        # Input places per output place, as torch computes it: by the factor if one was given.
        ratio = 1 / factor if factor else n / max(out, 1)
        x = b.axis_map(x, dim, Window("resize", n, out, align_corners=align, ratio=ratio))
    return x


def _nearest_places(size: int, out: int, factor: float | None, exact: bool) -> Shape:
    """Which entry each place takes: computed by torch itself, whose fp32 arithmetic decides ties."""
    operator = torch.ops.aten._upsample_nearest_exact1d if exact else torch.ops.aten.upsample_nearest1d
    places = torch.arange(size, dtype=torch.float64, device="cpu").reshape(1, 1, -1)
    return tuple(int(k) for k in operator(places, [out], factor).flatten().tolist())


def _factor(call: Call, axis: int) -> float | None:
    """The scale factor of an axis, if one was given."""
    factors = call.get("scale_factors")
    if factors is None:
        factors = [call.get(name) for name in ("scales_d", "scales_h", "scales_w", "scales")]
        factors = [f for f in factors if f is not None]
    return float(factors[axis]) if factors and len(factors) > axis and factors[axis] else None
