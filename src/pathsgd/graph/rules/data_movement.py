"""Data movement: views, permutations, slices, concatenation, constants. Units move, nothing is multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pathsgd.graph.builder import Builder, Ends, Paths, Unknown, Value
from pathsgd.graph.nodes import Window, number
from pathsgd.graph.rules.registry import Call, rule


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze",
      "view_copy", "_reshape_alias", moves=True)  # fmt: skip
def reshape(b: Builder, call: Call) -> Value:
    # The exported program already knows the resulting shape, so every spelling is one case.
    return b.reshape(call["self"], call.shape)


@rule("permute", "permute_copy", moves=True)
def permute(b: Builder, call: Call) -> Value:
    return b.permute(call["self"], call["dims"])


@rule("transpose", "swapaxes", "swapdims", "transpose_copy", moves=True)
def transpose(b: Builder, call: Call) -> Value:
    ndim = len(call.shape)
    order = list(range(ndim))
    i, j = call.get("dim0", "axis0") % ndim, call.get("dim1", "axis1") % ndim
    order[i], order[j] = order[j], order[i]
    return b.permute(call["self"], order)


@rule("t", "numpy_T", "mT", "t_copy", moves=True)
def t(b: Builder, call: Call) -> Value:
    ndim = len(call.shape)
    if ndim < 2:
        return call["self"]
    order = list(range(ndim))
    if call.name == "numpy_T":
        order.reverse()
    else:
        order[-2:] = [ndim - 1, ndim - 2]
    return b.permute(call["self"], order)


@rule("movedim", "moveaxis", moves=True)
def movedim(b: Builder, call: Call) -> Value:
    ndim = len(call.shape)
    source, target = call["source"], call["destination"]
    source = [source] if isinstance(source, int) else source
    target = [target] if isinstance(target, int) else target
    moved = {t % ndim: s % ndim for s, t in zip(source, target, strict=True)}
    rest = iter(d for d in range(ndim) if d not in moved.values())
    return b.permute(call["self"], [moved[d] if d in moved else next(rest) for d in range(ndim)])


@rule("expand", "expand_as", "broadcast_to", "expand_copy", moves=True, ignores=("other",))
def expand(b: Builder, call: Call) -> Value:
    return b.expand(call["self"], call.shape)


@rule("repeat", "tile", moves=True)
def repeat(b: Builder, call: Call) -> Value:
    value = call.paths("self")
    old = (1,) * (len(call.shape) - len(b.shape(value))) + b.shape(value)
    value = b.reshape(value, old)
    for dim, (before, after) in enumerate(zip(old, call.shape, strict=True)):
        if before != after:
            index = tuple(range(before)) * (after // max(before, 1))
            value = b.axis_map(value, dim, Window("gather", before, after, index=index))
    return value


@rule("select", "select_copy", moves=True)
def select(b: Builder, call: Call) -> Value:
    shape = b.shape(call["self"])
    dim = call["dim"] % len(shape)
    index = call["index"] % shape[dim]
    return b.reshape(b.slice(call["self"], dim, index, 1), call.shape)


@rule("slice", "slice_copy", moves=True)
def slice_(b: Builder, call: Call) -> Value:
    shape = b.shape(call["self"])
    dim = (call.get("dim", default=0)) % len(shape)
    start, _, step = slice(call.get("start"), call.get("end"), call.get("step")).indices(shape[dim])
    return b.slice(call["self"], dim, start, call.shape[dim], step)


@rule("narrow", moves=True)
def narrow(b: Builder, call: Call) -> Value:
    dim = call["dim"] % len(call.shape)
    start = call["start"] % max(b.shape(call["self"])[dim], 1)
    return b.slice(call["self"], dim, start, call["length"])


def split_value(b: Builder, value: Value, dim: int, lengths: Sequence[int]) -> list[Value]:
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    return [b.slice(value, dim, s, n) for s, n in zip(starts, lengths, strict=True)]


@rule("split", "split_with_sizes", "split_copy", "split_with_sizes_copy", "chunk", moves=True)
def split(b: Builder, call: Call) -> list[Value]:
    value: Value = call["self"]
    dim = call.get("dim", default=0) % len(b.shape(value))
    size = b.shape(value)[dim]
    if call.name == "chunk":
        each = max(-(-size // call["chunks"]), 1)
    else:
        each = call.get("split_size", "split_sizes")
    if isinstance(each, int):
        each = [min(each, size - start) for start in range(0, size, each)]
    return split_value(b, value, dim, each)


@rule("unbind", "unbind_copy", moves=True)
def unbind(b: Builder, call: Call) -> list[Value]:
    value: Value = call["self"]
    shape = b.shape(value)
    dim = call.get("dim", default=0) % len(shape)
    rest = shape[:dim] + shape[dim + 1 :]
    return [b.reshape(piece, rest) for piece in split_value(b, value, dim, [1] * shape[dim])]


@rule("cat", "concat", "concatenate", moves=True)
def cat(b: Builder, call: Call) -> Value:
    values: list[Value] = call["tensors"]
    return join(b, values, call.get("dim", default=0) % len(call.shape))


@rule("stack", moves=True)
def stack(b: Builder, call: Call) -> Value:
    dim = call.get("dim", default=0) % len(call.shape)
    one = (*call.shape[:dim], 1, *call.shape[dim + 1 :])
    return join(b, [b.reshape(value, one) for value in call["tensors"]], dim)


def join(b: Builder, values: Sequence[Value], dim: int) -> Value:
    if not any(isinstance(value, Paths) for value in values):
        raise Ends("a tensor joined from several weights")
    # torch lets an empty vector join anything.
    full = [value for value in values if b.shape(value) != (0,)]
    return b.cat([b.paths(value) for value in full], dim)


@rule("flip", moves=True)
def flip(b: Builder, call: Call) -> Value:
    value = call.paths("self")
    for d in call["dims"]:
        dim = d % len(call.shape)
        n = call.shape[dim]
        value = b.axis_map(value, dim, Window("gather", n, n, index=tuple(range(n - 1, -1, -1))))
    return value


@rule("roll", moves=True)
def roll(b: Builder, call: Call) -> Value:
    value = call.paths("self")
    if not call.get("dims"):
        raise Ends("roll over flattened axes")
    for shift, d in zip(call["shifts"], call["dims"], strict=True):
        dim = d % len(call.shape)
        n = call.shape[dim]
        index = tuple((k - shift) % n for k in range(n))
        value = b.axis_map(value, dim, Window("gather", n, n, index=index))
    return value


@rule("pixel_shuffle", "channel_shuffle", "pixel_unshuffle", moves=True)
def shuffle(b: Builder, call: Call) -> Value:
    x = call.paths("self")
    if call.name == "channel_shuffle":
        batch, channels, *rest = b.shape(x)
        x = b.reshape(x, (batch, call["groups"], channels // call["groups"], *rest))
        x = b.permute(x, (0, 2, 1, *range(3, 3 + len(rest))))
        return b.reshape(x, call.shape)
    *lead, c, h, w = b.shape(x)
    n = len(lead)
    if call.name == "pixel_shuffle":
        r = call["upscale_factor"]
        x = b.reshape(x, (*lead, c // r**2, r, r, h, w))
        x = b.permute(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    else:
        r = call["downscale_factor"]
        x = b.reshape(x, (*lead, c, h // r, r, w // r, r))
        x = b.permute(x, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return b.reshape(x, call.shape)


@rule("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
      "scalar_tensor", moves=True, ignores=("self",))  # fmt: skip
def fill(b: Builder, call: Call) -> Value:
    value: Any = call.get("fill_value", "s", default=0.0)
    if "zeros" in call.name:
        value = 0.0
    elif "ones" in call.name:
        value = 1.0
    if not isinstance(value, (int, float)) or not call.floating:
        return Unknown(call.shape, call.floating, f"a constant made by {call.name}")
    return replace(number(value), shape=call.shape)
