"""One step of many tensors in a launch. Each program moves some entries of one tensor, found in a table.

gamma is read as it is stored: entry by entry, or as the product of two numbers. A row of the table, in 64
bits each, is

    0-6    addresses: weight, gradient, two tensors of state, number of steps, and the two factors of gamma
    7-8    lr, weight decay, as floats
    9-11   number of entries, and sizes of the two inner axes
    12-26  strides over the three axes: of weight, gradient, state and both factors
"""

import triton
import triton.language as tl

from pathsgd.optim.fused.gpu.triton_rule import (
    MOMENTUM,
    SGD,
    find_rates,
    load_weights,
    store_weights,
    update,
)

FIELDS: tl.constexpr = tl.constexpr(27)
BLOCK: tl.constexpr = tl.constexpr(2048)
"""Entries of a program."""
TOGETHER: tl.constexpr = tl.constexpr(4)
"""Entries of one access, where tensors are plain or outer: then columns are a multiple of it."""
PLAIN: tl.constexpr = tl.constexpr(0)
"""All tensors lie entry by entry in the same order."""
OUTER: tl.constexpr = tl.constexpr(1)
"""But gamma is the outer product of two vectors."""
STRIDED: tl.constexpr = tl.constexpr(2)
"""Each in an order of its own."""


@triton.jit
def _pointer(row, field: tl.constexpr, KIND: tl.constexpr):
    pointer = tl.load(row + field).to(tl.pointer_type(tl.float32))
    return pointer if KIND == STRIDED else tl.multiple_of(pointer, 4 * TOGETHER)


@triton.jit
def _number(row, field: tl.constexpr):
    return tl.load((row + field).to(tl.pointer_type(tl.float64), bitcast=True)).to(tl.float32)


@triton.jit
def _integer(row, field: tl.constexpr):
    return tl.load(row + field).to(tl.int32)


@triton.jit
def _place(row, field: tl.constexpr, i, KIND: tl.constexpr):
    """Where the entries are of the tensor whose strides begin at this field."""
    if KIND != STRIDED:
        return i
    middle, inner = _integer(row, 10), _integer(row, 11)
    j = i // inner
    first, second = _integer(row, field), _integer(row, field + 1)
    return (j // middle) * first + (j % middle) * second + (i % inner) * _integer(row, field + 2)


@triton.jit
def _invert_root(x):
    """``1 / sqrt(x)`` rounded as the reference rounds it, 0 for 0."""
    return tl.where(x > 0, tl.div_rn(1.0, tl.sqrt_rn(tl.where(x > 0, x, 1.0))), 0.0)


@triton.jit
def _load_root(row, i, mask, KIND: tl.constexpr):
    """``1 / sqrt(gamma)``."""
    if KIND == PLAIN:
        return _invert_root(tl.load(_pointer(row, 5, KIND) + i, mask, 0.0))
    if KIND == OUTER:
        columns = tl.multiple_of(_integer(row, 11), TOGETHER)
        heads, tails = i // columns, i % columns
    else:
        heads, tails = _place(row, 21, i, KIND), _place(row, 24, i, KIND)
    head = _invert_root(tl.load(_pointer(row, 5, KIND) + heads, mask, 0.0))
    return head * _invert_root(tl.load(_pointer(row, 6, KIND) + tails, mask, 0.0))


@triton.jit
def multi_tensor_kernel(
    table, tiles, momentum, lr_decay, first, rest_first, log_first, second, rest_second, log_second, eps,
    KIND: tl.constexpr, METHOD: tl.constexpr, NESTEROV: tl.constexpr, DECAY: tl.constexpr,
    MAXIMIZE: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    tile = tiles + 2 * tl.program_id(0)
    row = table + tl.load(tile) * FIELDS
    i = tl.load(tile + 1) * BLOCK + tl.arange(0, BLOCK)
    count = _integer(row, 9)
    if KIND != STRIDED:
        count = tl.multiple_of(count, TOGETHER)
    mask = i < count
    w_at = _pointer(row, 0, KIND) + _place(row, 12, i, KIND)
    g_at = _pointer(row, 1, KIND) + _place(row, 15, i, KIND)
    state = _place(row, 18, i, KIND)
    m_at, v_at = _pointer(row, 2, KIND) + state, _pointer(row, 3, KIND) + state
    w, g, m, v = load_weights(w_at, g_at, m_at, v_at, mask, METHOD)
    root = _load_root(row, i, mask, KIND)
    lr, weight_decay, step = _number(row, 7), _number(row, 8), 1.0
    if METHOD != SGD and METHOD != MOMENTUM:
        step = tl.load(_pointer(row, 4, STRIDED))
    rate, correction, shrink = find_rates(lr, step, weight_decay, lr_decay, log_first, log_second, METHOD)
    w, m, v = update(
        w, g, m, v, root, rate, correction, shrink, weight_decay, momentum, first, rest_first, second,
        rest_second, eps, METHOD, NESTEROV, DECAY, MAXIMIZE, QUICK,
    )  # fmt: skip
    store_weights(w_at, m_at, v_at, mask, w, m, v, METHOD)
