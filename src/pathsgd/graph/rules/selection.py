"""Entries chosen by indices, masks or their order. Which ones may depend on the input, so all that may be
chosen count as one unit: whichever is taken, a factor of them all is the factor of the result.

An index takes the mean of what it may take, as attention does (:func:`pathsgd.graph.rules.weighted.attend`),
and a scatter leads to every place in equal shares: any fixed shares allow the same rescalings. The largest
of several units are taken as max pooling takes them, every unit an edge of weight 1. A mask hides no path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathsgd.graph.builder import (
    MASK,
    Builder,
    Choice,
    Ends,
    Paths,
    Unknown,
    Value,
    is_fixed,
    is_zero,
    parameters_of,
)
from pathsgd.graph.nodes import Shape, Weight, Window, number
from pathsgd.graph.rules.matrix_products import attend
from pathsgd.graph.rules.pooling import zero_pad
from pathsgd.graph.rules.registry import Call, Result, rule
from pathsgd.graph.rules.weighted import embedding

# By indices


@dataclass(frozen=True)
class Index(Unknown):
    """Indices written in the code, which choose the same entries whatever the input."""

    numbers: Shape = ()


def as_index(numbers: Tensor) -> Index:
    chooses = numbers.dtype != torch.bool and not numbers.is_complex()
    flat = tuple(map(int, numbers.detach().flatten().tolist())) if chooses else ()
    return Index(tuple(numbers.shape), False, "a tensor of integers", numbers=flat)


@rule("index")
def index(b: Builder, call: Call) -> Result:
    x: Value = call["self"]
    dims = [d for d, at in enumerate(call["indices"]) if at is not None]
    if not isinstance(x, Paths):
        return _look_up(b, call, x, dims)
    at = call["indices"][dims[0]]
    if len(dims) == 1 and isinstance(at, Index) and at.numbers:
        return b.reshape(_gather(b, x, dims[0], at), call.shape)
    mean = _shares(b, x, dims, math.prod(b.shape(x)[d] for d in dims))
    kept = [n for d, n in enumerate(b.shape(mean)) if d not in dims]
    first = _first_new_axis(dims)
    kept[first:first] = [1] * (len(call.shape) - len(kept))
    return b.expand(b.reshape(mean, kept), call.shape)


@rule("index_select", "gather", "take_along_dim", "repeat_interleave")
def take(b: Builder, call: Call) -> Result:
    x: Value = call["self"]
    if call.get("dim") is None or not b.shape(x):
        x = b.reshape(x, (-1,))
    dim = call.get("dim", default=0) % max(len(b.shape(x)), 1)
    repeats = call.get("repeats")
    if isinstance(repeats, int):
        before, after = b.shape(x)[: dim + 1], b.shape(x)[dim + 1 :]
        x = b.reshape(x, (*before, 1, *after))
        return b.reshape(b.expand(x, (*before, repeats, *after)), call.shape)
    if not isinstance(x, Paths):
        return _look_up(b, call, x, [dim] if call.name == "index_select" else [])
    if call.name == "index_select" and isinstance(call["index"], Index):
        return _gather(b, x, dim, call["index"])
    x = _shares(b, x, [dim], b.shape(x)[dim])
    return _fit(b, x, call.shape, dim) if call.name == "gather" else b.expand(x, call.shape)


def _gather(b: Builder, x: Paths, dim: int, at: Index) -> Paths:
    size = b.shape(x)[dim]
    index = tuple(k % size for k in at.numbers)
    return b.axis_map(x, dim, Window("gather", size, len(index), index=index))


def _look_up(b: Builder, call: Call, table: Value, dims: list[int]) -> Result:
    """Rows of a matrix that is a parameter, as an embedding looks them up; or some of several matrices."""
    reason = f"a weight computed by {call.name}"
    if dims == [0] and isinstance(table, Weight) and table.parameter is not None:
        if len(table.shape) == 2:
            return embedding(b, Call("embedding", {"weight": table}, call.shape))
        if len(table.shape) == len(call.shape) == 3:
            return Choice(call.shape, True, reason, parameters_of(table), table)
    raise Ends(reason)


@rule("embedding_bag", "_embedding_bag")
def embedding_bag(b: Builder, call: Call) -> Value:
    """As many embeddings as a bag holds, or their mean."""
    if call.get("per_sample_weights") is not None:
        raise Ends("embedding_bag with weights of its own for each entry")
    bags = max(call.shape[0], 1)
    x = _look_up(b, Call("embedding_bag", {}, call.shape), call.weight("weight"), [0])
    assert isinstance(x, Paths)
    return x if call["mode"] == 1 else b.times(x, math.prod(b.shape(call["indices"])) / bags)


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce", "index_fill")
def scatter(b: Builder, call: Call) -> Value:
    if call.get("reduce") in ("prod", "multiply"):
        raise Ends("a product of what is put in one place")
    put = _as_units(b, call.get("src", "source", "value", default=0.0))
    if isinstance(put, Paths) and call.shape:
        dim = call["dim"] % len(call.shape)
        put = b.reshape(put, (1,) * (len(call.shape) - len(b.shape(put))) + b.shape(put))
        put = b.times(put, call.get("alpha", default=1))
        put = _fit(b, _shares(b, put, [dim], call.shape[dim]), call.shape, dim)
    return join(b, call, [call["self"], put])


@rule("index_put", "_unsafe_index_put")
def index_put(b: Builder, call: Call) -> Value:
    call.ignore("accumulate")
    put = _as_units(b, call["values"])
    if isinstance(put, Paths):
        indices = call["indices"]
        dims = [d for d, at in enumerate(indices) if at is not None]
        axes, first = 1, _first_new_axis(dims)
        if any(len(indices[d].shape) != 1 for d in dims):
            # A mask over several axes looks as several axes of indices do: what neither touches comes last.
            reach = sum(1 if at is None else max(len(at.shape), 1) for at in indices)
            dims, first = list(range(min(reach, len(call.shape)))), 0
            axes = max(len(b.shape(put)) - len(call.shape) + len(dims), 0)
        ndim = len(call.shape) - len(dims) + axes
        put = b.reshape(put, (1,) * (ndim - len(b.shape(put))) + b.shape(put))
        new = range(first, first + axes)
        put = _shares(b, put, new, math.prod(call.shape[d] for d in dims))
        kept = iter(n for d, n in enumerate(b.shape(put)) if d not in new)
        put = b.reshape(put, [1 if d in dims else next(kept) for d in range(len(call.shape))])
    return join(b, call, [call["self"], put])


@rule("grid_sampler", "max_unpool2d", "max_unpool3d")
def move_places(b: Builder, call: Call) -> Value:
    """Samples at computed places, and entries put back where max pooling took them from."""
    sampled = call.name == "grid_sampler"
    x = call.paths("input" if sampled else "self")
    places = range(2 if sampled else len(call.shape) - len(call["output_size"]), len(call.shape))
    shape = b.shape(x) if sampled else call.shape
    return b.expand(_shares(b, x, places, math.prod(shape[d] for d in places)), call.shape)


@rule("_sparse_mm")
def sparse_mm(b: Builder, call: Call) -> Value:
    """A sparse matrix as attention: which entries it has is not asked."""
    return attend(b, call.paths("dense"), call.shape[0], call.shape)


def _first_new_axis(dims: Sequence[int]) -> int:
    """As in numpy, the axes of indices stand in place of those indexed, or first if these are apart."""
    return dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0


def _as_units(b: Builder, value: Any) -> Any:
    """A parameter as edges from the constant unit; anything else as it is."""
    return b.paths(value.as_role("bias")) if isinstance(value, Weight) and value.parameter else value


def _shares(b: Builder, x: Paths, dims: Sequence[int], places: int) -> Paths:
    """The sum over ``dims``, kept with size one, in equal shares for so many places."""
    return b.times(b.reduce(x, dims) if dims else x, 1 / max(places, 1))


def _fit(b: Builder, x: Paths, shape: Shape, dim: int) -> Paths:
    """``x`` expanded along ``dim``, and along other axes cut or filled with zeros, to ``shape``."""
    for d, n in enumerate(shape):
        if d != dim:
            x = b.slice(x, d, 0, min(n, b.shape(x)[d]))
            x = zero_pad(b, x, d, 0, n - b.shape(x)[d])
    return b.expand(x, shape)


# By order


@rule("topk", "sort", "msort", "kthvalue", "median", "nanmedian", "mode", "aminmax")
def largest(b: Builder, call: Call) -> list[Value]:
    """All units of the axis lead to each that is returned. Their indices carry no path."""
    x = call.paths("self")
    ndim = len(b.shape(x))
    dim = call.get("dim", default={"msort": 0, "topk": -1, "sort": -1}.get(call.name))
    dims = [dim % ndim] if dim is not None and ndim else list(range(ndim))
    y = b.reduce(x, dims) if dims else x
    y = b.expand(y, call.shape) if len(call.shape) == ndim else b.reshape(y, call.shape)
    return [y, y] if call.name == "aminmax" else [y]


# By masks


@rule("gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal", "not_equal")
def compare(b: Builder, call: Call) -> Value:
    """No rescaling changes how a unit compares with zero, or with a unit that is rescaled with it."""
    left, right = call["self"], call["other"]
    pair = [v for v in (left, right) if not (is_zero(v) if isinstance(v, Weight) else v == 0)]
    if any(not isinstance(v, Paths) and parameters_of(v) for v in pair):
        raise Ends("a mask computed from a weight")
    if all(isinstance(v, Paths) for v in pair) and pair:
        b.add(pair)  # a sum that nobody reads: its summands are rescaled together
    else:
        for v in pair:
            b.end(v, "a comparison with something other than zero")
    return Unknown(call.shape, False, MASK)


@rule("logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or",
      "__and__", "__or__")  # fmt: skip
def combine(b: Builder, call: Call) -> Value:
    masks = [call["self"], *([call["other"]] if "other" in call.arguments else [])]
    if not all(isinstance(v, Unknown) and v.reason == MASK for v in masks):
        raise Ends(f"{call.name} of values that are no masks")
    return Unknown(call.shape, False, MASK)


@rule("where")
def where(b: Builder, call: Call) -> Value:
    return join(b, call, [call["self"], call["other"]])


def join(b: Builder, call: Call, values: Sequence[Any]) -> Value:
    """A value each of whose entries is one of these or a sum of them: all are incoming edges of one unit."""
    if not call.floating:
        raise Ends("a tensor of integers")
    values = [number(v) if isinstance(v, (int, float)) else v for v in values]
    values = [v for v in values if not is_zero(v)]
    if any(is_fixed(v) or isinstance(v, Unknown) for v in values):
        raise Ends(f"{call.name} with a constant other than zero")
    if not any(isinstance(v, Paths) for v in values):
        raise Ends(f"a weight computed by {call.name}")
    return b.expand(b.add([v.as_role("bias") if isinstance(v, Weight) else v for v in values]), call.shape)


@rule("nan_to_num")
def nan_to_num(b: Builder, call: Call) -> Value:
    if call.get("nan"):
        raise Ends("nan_to_num with a value other than zero")
    return call.paths("self")
