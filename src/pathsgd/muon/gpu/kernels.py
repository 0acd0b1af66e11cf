"""The kernels of BalancedMuon's step. Each program has one chunk of one block, found in tables (step.py).

Sums over a block are written chunk by chunk and added up by ``sum_kernel``: nothing is added atomically, so a
step gives the same bits every time.
"""

import triton
import triton.language as tl

CHUNK: tl.constexpr = tl.constexpr(4096)
"""Entries of a program."""
FIELDS: tl.constexpr = tl.constexpr(8)
"""Number of fields of a block: addresses of weight, gradient and two tensors of state; how many entries it
has, how many lie side by side, and how far it is from their last to the next; where its direction begins."""
SUMS: tl.constexpr = tl.constexpr(5)
"""Number of sums of a block: <W, W>, <G, G>, <G, W>, <W, D>, <D, D>."""


@triton.jit
def _find_chunk(table, chunks):
    """(fields and number of the block; entries, where they lie, which of them exist)."""
    chunk = chunks + 2 * tl.program_id(0)
    number = tl.load(chunk)
    block = table + number * FIELDS
    entries = tl.load(chunk + 1) + tl.arange(0, CHUNK)
    at = entries + (entries // tl.load(block + 5).to(tl.int32)) * tl.load(block + 6).to(tl.int32)
    return block, number, entries, at, entries < tl.load(block + 4).to(tl.int32)


@triton.jit
def _pointer(block, field: tl.constexpr):
    return tl.load(block + field).to(tl.pointer_type(tl.float32))


@triton.jit
def _store_product(partial, column: tl.constexpr, x, y):
    """The inner product over a chunk, in fp64: no square is lost."""
    tl.store(partial + SUMS * tl.program_id(0) + column, tl.sum(x.to(tl.float64) * y.to(tl.float64), 0))


@triton.jit
def _load_with_products(block, at, mask, partial):
    w = tl.load(_pointer(block, 0) + at, mask, 0.0)
    g = tl.load(_pointer(block, 1) + at, mask, 0.0)
    _store_product(partial, 0, w, w)
    _store_product(partial, 1, g, g)
    _store_product(partial, 2, g, w)
    return w, g


@triton.jit
def momentum_kernel(table, chunks, partial, directions, momenta, NESTEROV: tl.constexpr):
    """Momentum, and what of it is to be orthogonalised, whose square takes the place of <D, D>."""
    block, number, entries, at, mask = _find_chunk(table, chunks)
    momentum = tl.load(momenta + number)
    _, g = _load_with_products(block, at, mask, partial)
    buffer = momentum * tl.load(_pointer(block, 2) + at, mask, 0.0) + g
    tl.store(_pointer(block, 2) + at, buffer, mask)
    moment = g + momentum * buffer if NESTEROV else buffer
    place = directions + tl.load(block + 7) + entries
    tl.store(place, moment.to(directions.dtype.element_ty), mask)
    _store_product(partial, 4, moment, moment)


@triton.jit
def normalize_kernel(table, chunks, sums, moments, directions):
    """Divides what is to be orthogonalised by its norm, in another dtype, in the same place."""
    block, number, entries, _, mask = _find_chunk(table, chunks)
    square = tl.load(sums + SUMS * number + 4)
    inverse = 1.0 / tl.sqrt(tl.where(square > 0, square, 1.0))
    place = tl.load(block + 7) + entries
    moment = tl.load(moments + place, mask, 0.0).to(tl.float64)  # in which the inverse is in range
    tl.store(directions + place, (moment * inverse).to(tl.float32).to(directions.dtype.element_ty), mask)


@triton.jit
def measure_kernel(table, chunks, partial, directions):
    """<W, D> and <D, D> of orthogonalised directions."""
    block, _, entries, at, mask = _find_chunk(table, chunks)
    w = tl.load(_pointer(block, 0) + at, mask, 0.0)
    d = tl.load(directions + tl.load(block + 7) + entries, mask, 0.0).to(tl.float32)
    _store_product(partial, 3, w, d)
    _store_product(partial, 4, d, d)


@triton.jit
def move_kernel(table, chunks, directions, lengths, factors):
    block, number, entries, at, mask = _find_chunk(table, chunks)
    place = _pointer(block, 0) + at
    d = tl.load(directions + tl.load(block + 7) + entries, mask, 0.0).to(tl.float32)
    w = tl.load(place, mask, 0.0) - tl.load(lengths + number) * d
    tl.store(place, tl.load(factors + number) * w, mask)


@triton.jit
def adam_kernel(table, chunks, partial, rest_first, second, rest_second, eps):
    """Adam's averages, and the products with its direction."""
    block, _, _, at, mask = _find_chunk(table, chunks)
    w, g = _load_with_products(block, at, mask, partial)
    mean = tl.load(_pointer(block, 2) + at, mask, 0.0)
    mean += rest_first * (g - mean)
    square = second * tl.load(_pointer(block, 3) + at, mask, 0.0) + rest_second * (g * g)
    tl.store(_pointer(block, 2) + at, mean, mask)
    tl.store(_pointer(block, 3) + at, square, mask)
    d = tl.where(mask, mean / (tl.sqrt_rn(square) + eps), 0.0)
    _store_product(partial, 3, w, d)
    _store_product(partial, 4, d, d)


@triton.jit
def move_adam_kernel(table, chunks, lengths, factors, eps):
    block, number, _, at, mask = _find_chunk(table, chunks)
    mean = tl.load(_pointer(block, 2) + at, mask, 0.0)
    square = tl.load(_pointer(block, 3) + at, mask, 0.0)
    d = mean / (tl.sqrt_rn(square) + eps)
    w = tl.load(_pointer(block, 0) + at, mask, 0.0) - tl.load(lengths + number) * d
    tl.store(_pointer(block, 0) + at, tl.load(factors + number) * w, mask)


@triton.jit
def sum_kernel(partial, firsts, numbers, sums, column, AT_ONCE: tl.constexpr):
    """Adds up what was found of a block's chunks."""
    k, column = tl.program_id(0), tl.program_id(1) + column
    start, stop = tl.load(firsts + k), tl.load(firsts + k + 1)
    total = tl.zeros((AT_ONCE,), tl.float64)
    for chunk in range(start, stop, AT_ONCE):
        at = chunk + tl.arange(0, AT_ONCE)
        total += tl.load(partial + SUMS * at + column, at < stop, 0.0)
    tl.store(sums + SUMS * tl.load(numbers + k) + column, tl.sum(total, 0))


@triton.jit
def gather_kernel(addresses, values, count, SIZE: tl.constexpr):
    """Reads one number at each address."""
    k = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    place = tl.load(addresses + k, k < count, 0).to(tl.pointer_type(tl.float32))
    tl.store(values + k, tl.load(place, k < count, 0.0), k < count)


# Upkeep. A parameter is a matrix here, its columns all that is side by side. Nothing is done unless ``due``.

UNIT_FIELDS: tl.constexpr = tl.constexpr(7)
"""Number of fields of a parameter: addresses of weight and two tensors of state, 0 if there are none; rows,
columns; where its rows begin in the list of all rows and columns, and where its columns do."""
ROWS: tl.constexpr = tl.constexpr(8)
COLUMNS: tl.constexpr = tl.constexpr(128)


@triton.jit
def _if_due(count, steps, every):
    """The count, or 0 where nothing is to be done."""
    return tl.where(tl.load(steps) % every == 0, count, 0)


@triton.jit
def row_kernel(table, tiles, steps, every, sums):
    """Sums of squares over rows, ROWS of them a program."""
    tile = tiles + 2 * tl.program_id(0)
    p = table + tl.load(tile) * UNIT_FIELDS
    rows, columns = _if_due(tl.load(p + 3), steps, every), tl.load(p + 4)
    i = tl.load(tile + 1) + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, _if_due(columns, steps, every), COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        mask = (i < rows)[:, None] & (c < columns)[None, :]
        w = tl.load(_pointer(p, 0) + i[:, None] * columns + c[None, :], mask, 0.0)
        total += w * w
    tl.store(sums + tl.load(p + 5) + i, tl.sum(total, 1), i < rows)


@triton.jit
def column_kernel(table, tiles, steps, every, sums):
    """Sums of squares over columns, COLUMNS of them a program."""
    tile = tiles + 2 * tl.program_id(0)
    p = table + tl.load(tile) * UNIT_FIELDS
    rows, columns = _if_due(tl.load(p + 3), steps, every), tl.load(p + 4)
    c = tl.load(tile + 1) + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        i = start + tl.arange(0, ROWS)
        mask = (i < rows)[:, None] & (c < columns)[None, :]
        w = tl.load(_pointer(p, 0) + i[:, None] * columns + c[None, :], mask, 0.0)
        total += w * w
    tl.store(sums + tl.load(p + 6) + c, tl.sum(total, 0), c < _if_due(columns, steps, every))


@triton.jit
def rescale_kernel(table, chunks, steps, every, factors):
    """Multiplies weights by the factors of their rows and columns, and state by powers of these."""
    chunk = chunks + 2 * tl.program_id(0)
    p = table + tl.load(chunk) * UNIT_FIELDS
    columns, size = tl.load(p + 4).to(tl.int32), (tl.load(p + 3) * tl.load(p + 4)).to(tl.int32)
    e = tl.load(chunk + 1) + tl.arange(0, CHUNK)
    mask = e < _if_due(size, steps, every)
    of_row = tl.load(factors + tl.load(p + 5) + e // columns, mask, 1.0)
    factor = of_row * tl.load(factors + tl.load(p + 6) + e % columns, mask, 1.0)
    tl.store(_pointer(p, 0) + e, tl.load(_pointer(p, 0) + e, mask, 0.0) * factor, mask)
    if tl.load(p + 1) != 0:
        first = tl.load(_pointer(p, 1) + e, mask, 0.0)
        tl.store(_pointer(p, 1) + e, first / factor, mask)
    if tl.load(p + 2) != 0:
        second = tl.load(_pointer(p, 2) + e, mask, 0.0)
        tl.store(_pointer(p, 2) + e, second / (factor * factor), mask)
