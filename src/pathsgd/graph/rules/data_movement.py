"""Data movement: views, permutations, slices, concatenation, constants. Units move, nothing is multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pathsgd.graph.builder import Builder, Ends, Paths, Unknown, Value, is_zero
from pathsgd.graph.nodes import Reshape, Stored, Weight, Window, number
from pathsgd.graph.rules.registry import Call, rule


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze",
      "view_copy", "_reshape_alias", "reshape_as", "view_as", moves=True, ignores=("other",))  # fmt: skip
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


@rule("split", "split_with_sizes", "split_copy", "split_with_sizes_copy", "unsafe_split",
      "unsafe_split_with_sizes", "chunk", "unsafe_chunk", "tensor_split", moves=True)  # fmt: skip
def split(b: Builder, call: Call) -> list[Value]:
    value: Value = call["self"]
    dim = call.get("dim", default=0) % len(b.shape(value))
    size = b.shape(value)[dim]
    each: Any
    if call.name == "tensor_split":
        ends = call.get("indices")
        n = call.get("sections", default=1)
        ends = [k * (size // n) + min(k, size % n) for k in range(1, n)] if ends is None else ends
        places = [range(size)[start:end] for start, end in zip([0, *ends], [*ends, size], strict=True)]
        return [b.slice(value, dim, p.start, len(p)) for p in places]
    if "chunk" in call.name:
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


@rule("hstack", "vstack", moves=True)
def stack_along(b: Builder, call: Call) -> Value:
    values: list[Value] = call["tensors"]
    if call.name == "vstack":
        values = [b.reshape(v, (1, -1)) if len(b.shape(v)) == 1 else v for v in values]
    return join(b, values, 1 if call.name == "hstack" and len(call.shape) > 1 else 0)


@rule("copy", moves=True, ignores=("self",))
def copy_over(b: Builder, call: Call) -> Value:
    if not call.floating:
        raise Ends("a cast to integers is not positively homogeneous")
    return b.expand(b.paths(call["src"]), call.shape)


@rule("slice_scatter", "select_scatter", moves=True)
def write_slice(b: Builder, call: Call) -> Value:
    """What is written into some places of an axis, and what was there in the others."""
    if not call.floating:
        raise Ends("a tensor of integers")
    dim = call.get("dim", default=0) % len(call.shape)
    size = call.shape[dim]
    if call.name == "select_scatter":
        places = range(size)[call["index"] :][:1]
    else:
        places = range(size)[slice(call.get("start"), call.get("end"), call.get("step"))]
    src = b.reshape(call["src"], (*call.shape[:dim], len(places), *call.shape[dim + 1 :]))
    index, parts, taken = [-1] * size, [], 0
    for value, into in ((call["self"], range(size)), (src, places)):
        for k, place in enumerate(into):
            index[place] = -1 if is_zero(value) else taken + k
        if not is_zero(value):
            parts.append(b.paths(value))
            taken += len(into)
    if not parts:
        return call["self"]
    whole = parts[0] if len(parts) == 1 else b.cat(parts, dim)
    return b.axis_map(whole, dim, Window("gather", taken, size, index=tuple(index)))


@rule("unfold", moves=True)
def unfold(b: Builder, call: Call) -> Value:
    """Windows of one axis, the entries of each along a new last axis."""
    x = call.paths("self")
    ndim = len(b.shape(x))
    dim, size = call["dimension"] % max(ndim, 1), call["size"]
    x = take_windows(b, x, dim, [k * call["step"] for k in range(call.shape[dim])], range(size))
    return b.permute(x, [*(d for d in range(ndim + 1) if d != dim + 1), dim + 1])


def take_windows(b: Builder, x: Paths, dim: int, starts: Sequence[int], taps: Sequence[int]) -> Paths:
    """The entries of an axis at ``start + tap``, by start and then by tap along a new axis; zeros outside."""
    shape = b.shape(x)
    n = shape[dim]
    index = tuple(s + t if 0 <= s + t < n else -1 for s in starts for t in taps)
    x = b.axis_map(x, dim, Window("gather", n, len(index), index=index))
    return b.reshape(x, (*shape[:dim], len(starts), len(taps), *shape[dim + 1 :]))


@rule("im2col")
def im2col(b: Builder, call: Call) -> Value:
    """Patches of an image, as a convolution reads them."""
    x = call.paths("self")
    n = len(b.shape(x)) - 2
    for k, dim in enumerate((n, n + 2)):
        kernel, dilation, padding, stride = (
            call[name][k % len(call[name])] for name in ("kernel_size", "dilation", "padding", "stride")
        )
        reach = dilation * (kernel - 1)
        starts = range(-padding, b.shape(x)[dim] + padding - reach, stride)
        x = take_windows(b, x, dim, starts, range(0, reach + 1, dilation))
    # (..., rows, row taps, columns, column taps)
    return b.reshape(b.permute(x, (*range(n), n + 1, n + 3, n, n + 2)), call.shape)


@rule("tril", "triu", moves=True)
def triangle(b: Builder, call: Call) -> Value:
    """A mask of ones and zeros, also on a weight."""
    shape = call.shape[-2:]
    ones = getattr(torch, call.name)(torch.ones(shape, device="cpu"), call["diagonal"])
    mask = Stored(shape, literal=tuple(ones.flatten().tolist()), views=(Reshape(shape),))
    value = call["self"]
    if isinstance(value, Weight):
        return replace(value, factors=(*value.factors, mask))
    return b.multiply(call.paths("self"), Weight(shape, None, (mask,), "constant"))


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


@rule("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
      "empty", "empty_like", "new_empty", "zero", "fill", "scalar_tensor", moves=True,
      ignores=("self",))  # fmt: skip
def fill(b: Builder, call: Call) -> Value:
    """Memory that is empty is written before it is read, so it may hold zeros."""
    value: Any = call.get("fill_value", "value", "s", default=0.0)
    if isinstance(value, (Paths, Weight)):
        return b.expand(value, call.shape)
    if "zeros" in call.name:
        value = 0.0
    elif "ones" in call.name:
        value = 1.0
    if not isinstance(value, (int, float)) or not call.floating:
        return Unknown(call.shape, call.floating, f"a constant made by {call.name}")
    return replace(number(value), shape=call.shape)
