"""The kernels of a relative step. Each program has one tile of one block, found in tables.

With out and into the factors of the units that a weight leads into and comes from, u = w (out / into) / size
and the gradient by u is h = g (into / out) size. Sums over a block are written tile by tile and added up by
``sum_kernel``: nothing is added atomically, so a step gives the same bits every time.
"""

import triton
import triton.language as tl

ROWS: tl.constexpr = tl.constexpr(8)
COLUMNS: tl.constexpr = tl.constexpr(512)
"""Of a tile."""

FIELDS: tl.constexpr = tl.constexpr(20)
"""Of a block: see layout.py."""
SUMS: tl.constexpr = tl.constexpr(3)
"""The most a kernel finds of a tile."""


@triton.jit
def _find_tile(blocks, tiles):
    """(fields of the block, its number, rows, columns, which of them exist)."""
    tile = tiles + 3 * tl.program_id(0)
    number = tl.load(tile)
    block = blocks + number * FIELDS
    i = tl.load(tile + 1).to(tl.int64) + tl.arange(0, ROWS)
    c = tl.load(tile + 2).to(tl.int64) + tl.arange(0, COLUMNS)
    mask = (i < tl.load(block + 5))[:, None] & (c < tl.load(block + 6))[None, :]
    return block, number, i, c, mask


@triton.jit
def _find_factors(block, heads, tails, i, c, mask):
    """The factors (out, into) of the units at both ends of every weight."""
    j = tl.load(block + 8) + (c // tl.load(block + 9)) % tl.load(block + 10)
    head = tl.load(block + 11) + i[:, None] * tl.load(block + 12) + j[None, :] * tl.load(block + 13)
    tail = tl.load(block + 14) + i[:, None] * tl.load(block + 15) + j[None, :] * tl.load(block + 16)
    return tl.load(heads + head, mask, 1.0), tl.load(tails + tail, mask, 1.0)


@triton.jit
def _find_places(block, i, c):
    """Where the tile lies in a tensor of the parameter's layout."""
    return i[:, None] * tl.load(block + 7) + c[None, :]


@triton.jit
def _pointer(block, field: tl.constexpr):
    return tl.load(block + field).to(tl.pointer_type(tl.float32))


@triton.jit
def _sum(x, y):
    """The sum of products over a tile, in fp64: no square is lost."""
    return tl.sum(tl.sum(x.to(tl.float64) * y.to(tl.float64), 1), 0)


@triton.jit
def norm_kernel(blocks, tiles, heads, tails, sizes, partial, GRADIENT: tl.constexpr):
    """The sum of squares of z = w out / into, or of h."""
    block, number, i, c, mask = _find_tile(blocks, tiles)
    out, into = _find_factors(block, heads, tails, i, c, mask)
    at = _find_places(block, i, c)
    if GRADIENT:
        x = tl.load(_pointer(block, 1) + at, mask, 0.0) * (into / out * tl.load(sizes + number))
    else:
        x = tl.load(_pointer(block, 0) + at, mask, 0.0) * (out / into)
    tl.store(partial + SUMS * tl.program_id(0), _sum(x, x))


@triton.jit
def momentum_kernel(
    blocks, tiles, heads, tails, sizes, inverse_sizes, partial, momentum,
    NESTEROV: tl.constexpr, directions,
):  # fmt: skip
    """Momentum of h, and what is to be orthogonalised; sums <h, h> and <h, u>."""
    block, number, i, c, mask = _find_tile(blocks, tiles)
    out, into = _find_factors(block, heads, tails, i, c, mask)
    at = _find_places(block, i, c)
    h = tl.load(_pointer(block, 1) + at, mask, 0.0) * (into / out * tl.load(sizes + number))
    u = tl.load(_pointer(block, 0) + at, mask, 0.0) * (out / into * tl.load(inverse_sizes + number))
    buffer = momentum * tl.load(_pointer(block, 2) + at, mask, 0.0) + h
    tl.store(_pointer(block, 2) + at, buffer, mask)
    if NESTEROV:
        direction = h + momentum * buffer
    else:
        direction = buffer
    where = directions + tl.load(block + 17) + i[:, None] * tl.load(block + 6) + c[None, :]
    tl.store(where, direction.to(directions.dtype.element_ty), mask)
    tl.store(partial + SUMS * tl.program_id(0), _sum(h, u))
    tl.store(partial + SUMS * tl.program_id(0) + 1, _sum(h, h))


@triton.jit
def move_kernel(
    blocks, tiles, heads, tails, sizes, inverse_sizes, partial, rates, directions,
):  # fmt: skip
    """Moves weights along their direction at these rates; sums <u, u> before and after."""
    block, number, i, c, mask = _find_tile(blocks, tiles)
    out, into = _find_factors(block, heads, tails, i, c, mask)
    at = _find_places(block, i, c)
    where = directions + tl.load(block + 17) + i[:, None] * tl.load(block + 6) + c[None, :]
    step = tl.load(rates + number) * tl.load(where, mask, 0.0).to(tl.float32)
    w = tl.load(_pointer(block, 0) + at, mask, 0.0)
    u = w * (out / into * tl.load(inverse_sizes + number))
    tl.store(_pointer(block, 0) + at, w - step * (into / out * tl.load(sizes + number)), mask)
    tl.store(partial + SUMS * tl.program_id(0), _sum(u, u))
    tl.store(partial + SUMS * tl.program_id(0) + 1, _sum(u - step, u - step))


@triton.jit
def adam_kernel(
    blocks, tiles, heads, tails, sizes, inverse_sizes, partial, rates, shrinks, keeps,
    first, rest_first, log_first, second, rest_second, log_second, eps,
):  # fmt: skip
    """Adam's step; sums <h, u>, and <u, u> before and after."""
    block, number, i, c, mask = _find_tile(blocks, tiles)
    out, into = _find_factors(block, heads, tails, i, c, mask)
    at = _find_places(block, i, c)
    # In fp64, since 1 - beta^step cancels.
    count = tl.load(_pointer(block, 4)).to(tl.float64)
    rate = tl.load(rates + number) / (1.0 - tl.exp(count * log_first)).to(tl.float32)
    correction = tl.sqrt((1.0 - tl.exp(count * log_second)).to(tl.float32))
    h = tl.load(_pointer(block, 1) + at, mask, 0.0) * (into / out * tl.load(sizes + number))
    h = tl.where(tl.load(keeps + number) != 0, h, 0.0)
    average = first * tl.load(_pointer(block, 2) + at, mask, 0.0) + rest_first * h
    square = second * tl.load(_pointer(block, 3) + at, mask, 0.0) + rest_second * (h * h)
    tl.store(_pointer(block, 2) + at, average, mask)
    tl.store(_pointer(block, 3) + at, square, mask)
    step = rate * (average / (tl.sqrt_rn(square) / correction + eps))
    w = tl.load(_pointer(block, 0) + at, mask, 0.0)
    u = w * (out / into * tl.load(inverse_sizes + number))
    shrink = tl.load(shrinks + number)
    tl.store(_pointer(block, 0) + at, w * shrink - step * (into / out * tl.load(sizes + number)), mask)
    moved = tl.where(mask, u * shrink - step, 0.0)
    tl.store(partial + SUMS * tl.program_id(0), _sum(h, u))
    tl.store(partial + SUMS * tl.program_id(0) + 1, _sum(u, u))
    tl.store(partial + SUMS * tl.program_id(0) + 2, _sum(moved, moved))


@triton.jit
def scale_kernel(blocks, tiles, factors):
    """Multiplies the weights of a block by its factor."""
    block, number, i, c, mask = _find_tile(blocks, tiles)
    at = _pointer(block, 0) + _find_places(block, i, c)
    tl.store(at, tl.load(at, mask, 0.0) * tl.load(factors + number), mask)


@triton.jit
def sum_kernel(partial, firsts, numbers, sums, AT_ONCE: tl.constexpr):
    """Adds up what was found of a block's tiles."""
    k = tl.program_id(0)
    start, stop = tl.load(firsts + k), tl.load(firsts + k + 1)
    for column in tl.static_range(SUMS):
        total = tl.zeros((AT_ONCE,), tl.float64)
        for tile in range(start, stop, AT_ONCE):
            at = tile + tl.arange(0, AT_ONCE)
            total += tl.load(partial + SUMS * at + column, at < stop, 0.0)
        tl.store(sums + SUMS * tl.load(numbers + k) + column, tl.sum(total, 0))
