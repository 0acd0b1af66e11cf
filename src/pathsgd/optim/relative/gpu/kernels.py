"""The kernels of a relative step. Each program has one tile of one block, found in tables (layout.py).

u = w f / size and the gradient by u is h = g size / f, with f the product of a factor of the row and one of
the input. Sums over a block are written tile by tile and added up by ``sum_kernel``: nothing is added
atomically, so a step gives the same bits every time.
"""

import math

import triton
import triton.language as tl

from pathsgd.optim.relative.growth import BETAS, NOISE

ROWS: tl.constexpr = tl.constexpr(8)
COLUMNS: tl.constexpr = tl.constexpr(256)
"""Of a tile."""
WARPS = 8
FIELDS: tl.constexpr = tl.constexpr(16)
"""Of a piece of a block."""
SUMS: tl.constexpr = tl.constexpr(4)
"""The most a kernel finds of a tile."""
BETA_FIRST, BETA_SECOND = tl.constexpr(BETAS[0]), tl.constexpr(BETAS[1])
SQUARED_NOISE = tl.constexpr((NOISE * 2.0**-23) ** 2)
LOG_FIRST, LOG_SECOND = tl.constexpr(math.log(BETAS[0])), tl.constexpr(math.log(BETAS[1]))
"""Of growth.py."""


@triton.jit
def _find_tile(pieces, tiles):
    """(fields of the piece, number of its block, rows, columns, which of them exist, where they lie)."""
    tile = tiles + 3 * tl.program_id(0)
    piece = pieces + tl.load(tile) * FIELDS
    i = tl.load(tile + 1) + tl.arange(0, ROWS)
    c = tl.load(tile + 2) + tl.arange(0, COLUMNS)
    mask = (i < tl.load(piece + 5))[:, None] & (c < tl.load(piece + 6))[None, :]
    at = i[:, None] * tl.load(piece + 7).to(tl.int32) + c[None, :]
    return piece, tl.load(piece + 13), i, c, mask, at


@triton.jit
def _find_factors(piece, factors, i, c):
    """The factors of rows and of columns."""
    j = (c // tl.load(piece + 8).to(tl.int32)) % tl.load(piece + 9).to(tl.int32)
    rows = tl.load(factors + tl.load(piece + 10) + i, i < tl.load(piece + 5), 1.0)
    columns = tl.load(factors + tl.load(piece + 11) + j, c < tl.load(piece + 6), 1.0)
    return rows, columns


@triton.jit
def _load_u(piece, number, factors, sizes, i, c, at, mask):
    """(w, u, what takes a step of u to one of w)."""
    rows, columns = _find_factors(piece, factors, i, c)
    size = tl.load(sizes + number)
    w = tl.load(_pointer(piece, 0) + at, mask, 0.0)
    u = w * ((rows / size)[:, None] * columns[None, :])
    return w, u, (size / rows)[:, None] * (1.0 / columns)[None, :]


@triton.jit
def _pointer(piece, field: tl.constexpr):
    return tl.load(piece + field).to(tl.pointer_type(tl.float32))


@triton.jit
def _find_directions(piece, directions, i, c):
    """Where the directions of a tile lie."""
    return directions + tl.load(piece + 12) + i[:, None] * tl.load(piece + 6).to(tl.int32) + c[None, :]


@triton.jit
def _find_inverse(squares, number):
    """1 / norm of a block, given the squares of norms among the sums; 1 if it is zero."""
    square = tl.load(squares + SUMS * number)
    return 1.0 / tl.sqrt(tl.where(square > 0, square, 1.0))


@triton.jit
def _store_rescaled(piece, rescaling, i, c, at, mask, w):
    rows, columns = _find_factors(piece, rescaling, i, c)
    tl.store(_pointer(piece, 0) + at, w * (rows[:, None] * columns[None, :]), mask)


@triton.jit
def _store_sum(partial, column: tl.constexpr, x, y):
    """The sum of products over a tile, in fp64: no square is lost."""
    products = x.to(tl.float64) * y.to(tl.float64)
    # Over rows first: a thread has all those of its columns, and shuffles nothing.
    tl.store(partial + SUMS * tl.program_id(0) + column, tl.sum(tl.sum(products, 0), 0))


@triton.jit
def norm_kernel(pieces, tiles, factors, sizes, partial, GRADIENT: tl.constexpr):
    """<z, z> with z = w f, or <h, h>."""
    piece, number, i, c, mask, at = _find_tile(pieces, tiles)
    rows, columns = _find_factors(piece, factors, i, c)
    if GRADIENT:
        scale = (tl.load(sizes + number) / rows)[:, None] * (1.0 / columns)[None, :]
        x = tl.load(_pointer(piece, 1) + at, mask, 0.0) * scale
    else:
        x = tl.load(_pointer(piece, 0) + at, mask, 0.0) * (rows[:, None] * columns[None, :])
    _store_sum(partial, 0, x, x)


@triton.jit
def momentum_kernel(pieces, tiles, factors, sizes, partial, directions, momentum, NESTEROV: tl.constexpr):
    """Momentum of h, and the direction d that is to be orthogonalised; <h, u>, <h, h> and <d, d>."""
    piece, number, i, c, mask, at = _find_tile(pieces, tiles)
    _, u, scale = _load_u(piece, number, factors, sizes, i, c, at, mask)
    h = tl.load(_pointer(piece, 1) + at, mask, 0.0) * scale
    buffer = momentum * tl.load(_pointer(piece, 2) + at, mask, 0.0) + h
    tl.store(_pointer(piece, 2) + at, buffer, mask)
    direction = h + momentum * buffer if NESTEROV else buffer
    place = _find_directions(piece, directions, i, c)
    tl.store(place, direction.to(directions.dtype.element_ty), mask)
    _store_sum(partial, 0, h, u)
    _store_sum(partial, 1, h, h)
    _store_sum(partial, 2, direction, direction)


@triton.jit
def normalize_kernel(pieces, tiles, squares, directions, normalized):
    """Divides directions by the norm of their block's, in another dtype if need be, in the same place."""
    piece, number, i, c, mask, _ = _find_tile(pieces, tiles)
    # In fp64, where the inverse of a norm is in range.
    direction = tl.load(_find_directions(piece, directions, i, c), mask, 0.0).to(tl.float64)
    direction = (direction * _find_inverse(squares, number)).to(tl.float32)
    place = _find_directions(piece, normalized, i, c)
    tl.store(place, direction.to(normalized.dtype.element_ty), mask)


@triton.jit
def square_kernel(pieces, tiles, factors, sizes, partial, directions):
    """<d, d> of directions."""
    piece, _, i, c, mask, _ = _find_tile(pieces, tiles)
    direction = tl.load(_find_directions(piece, directions, i, c), mask, 0.0)
    _store_sum(partial, 0, direction, direction)


@triton.jit
def move_kernel(
    pieces, tiles, factors, sizes, partial, rescaling, directions, rates, squares=None, decays=None
):  # fmt: skip
    """Moves weights along their direction, of norm 1 if its squares are given, shrinks and rescales them;
    <u, u> before and after."""
    piece, number, i, c, mask, at = _find_tile(pieces, tiles)
    w, u, scale = _load_u(piece, number, factors, sizes, i, c, at, mask)
    direction = tl.load(_find_directions(piece, directions, i, c), mask, 0.0).to(tl.float32)
    rate = tl.load(rates + number)
    if squares is not None:
        rate = (rate * _find_inverse(squares, number)).to(tl.float32)
    step = rate * direction
    if decays is not None:
        step += tl.load(decays + number) * u
    _store_rescaled(piece, rescaling, i, c, at, mask, w - step * scale)
    _store_sum(partial, 0, u, u)
    _store_sum(partial, 1, u - step, u - step)


@triton.jit
def _average(
    piece, at, mask, h, first, rest_first, log_first, second, rest_second, log_second, eps,
):  # fmt: skip
    """Adam's averages of h, and its direction."""
    # In fp64, since 1 - beta^step cancels.
    count = tl.load(_pointer(piece, 4)).to(tl.float64)
    correction = (1.0 - tl.exp(count * log_first)).to(tl.float32)
    square_correction = tl.sqrt((1.0 - tl.exp(count * log_second)).to(tl.float32))
    average = first * tl.load(_pointer(piece, 2) + at, mask, 0.0) + rest_first * h
    square = second * tl.load(_pointer(piece, 3) + at, mask, 0.0) + rest_second * (h * h)
    tl.store(_pointer(piece, 2) + at, average, mask)
    tl.store(_pointer(piece, 3) + at, square, mask)
    # Where mask is false all of it is zero, and eps may be.
    return tl.where(mask, average / correction / (tl.sqrt_rn(square) / square_correction + eps), 0.0)


@triton.jit
def direction_kernel(
    pieces, tiles, factors, sizes, partial, directions,
    first, rest_first, log_first, second, rest_second, log_second, eps,
):  # fmt: skip
    """Adam's direction, whose spectral norm is to be found; <h, u> and <h, h>."""
    piece, number, i, c, mask, at = _find_tile(pieces, tiles)
    _, u, scale = _load_u(piece, number, factors, sizes, i, c, at, mask)
    h = tl.load(_pointer(piece, 1) + at, mask, 0.0) * scale
    direction = _average(
        piece, at, mask, h, first, rest_first, log_first, second, rest_second, log_second, eps
    )
    tl.store(_find_directions(piece, directions, i, c), direction, mask)
    _store_sum(partial, 0, h, u)
    _store_sum(partial, 1, h, h)


@triton.jit
def adam_kernel(
    pieces, tiles, factors, sizes, partial, rescaling, rates, decays, keeps,
    first, rest_first, log_first, second, rest_second, log_second, eps,
):  # fmt: skip
    """Adam's step; <h, u>, <u, u> before and after, and <h, h>."""
    piece, number, i, c, mask, at = _find_tile(pieces, tiles)
    w, u, scale = _load_u(piece, number, factors, sizes, i, c, at, mask)
    h = tl.load(_pointer(piece, 1) + at, mask, 0.0) * scale
    h = tl.where(tl.load(keeps + number) != 0, h, 0.0)
    direction = _average(
        piece, at, mask, h, first, rest_first, log_first, second, rest_second, log_second, eps
    )
    step = tl.load(rates + number) * direction + tl.load(decays + number) * u
    _store_rescaled(piece, rescaling, i, c, at, mask, w - step * scale)
    _store_sum(partial, 0, h, u)
    _store_sum(partial, 1, u, u)
    _store_sum(partial, 2, u - step, u - step)
    _store_sum(partial, 3, h, h)


@triton.jit
def grow_kernel(
    pieces, tiles, firsts, found, moved, other, turns, catch_up, shares, rates, decays, growth, scales,
):  # fmt: skip
    """What a block is multiplied by, so that it turns and its norm grows: growth.py, a program a block.

    Args:
        found, moved, other: the sums that the kernels of Muon and of Adam found.
        rates: lr of every block.
        growth: how fast norms grow, in units of it.
        scales: what is found.
    """
    piece = pieces + tl.load(tiles + 3 * tl.load(firsts + tl.program_id(0))) * FIELDS
    number = tl.load(piece + 13)
    at = SUMS * number
    along = tl.load(found + at) + tl.load(other + at)
    old = tl.load(moved + at) + tl.load(other + at + 1)
    new = tl.load(moved + at + 1) + tl.load(other + at + 2)
    state, next_row = tl.load(piece + 14).to(tl.pointer_type(tl.float64)), tl.load(piece + 15)
    first = BETA_FIRST * tl.load(state) + (1 - BETA_FIRST) * along
    square = along * along + SQUARED_NOISE * (tl.load(found + at + 1) + tl.load(other + at + 3))
    second = BETA_SECOND * tl.load(state + next_row) + (1 - BETA_SECOND) * square
    steps = tl.load(state + 2 * next_row) + 1
    tl.store(state, first)
    tl.store(state + next_row, second)
    tl.store(state + 2 * next_row, steps)
    mean = first / (1 - tl.exp(steps * LOG_FIRST))
    square = second / (1 - tl.exp(steps * LOG_SECOND))
    direction = -mean / tl.sqrt(tl.where(square > 0, square, 1.0))  # 0 where the square is, too
    catch = tl.load(catch_up + number)
    speed = growth * tl.where(catch > 1, catch, tl.load(shares + number))
    rate = tl.load(rates + number).to(tl.float64)
    grown = tl.exp(rate * speed * direction) * (1 - rate * tl.load(decays + number))
    turning = (tl.load(turns + number) != 0) & (old > 0) & (new > 0)
    turned = grown * tl.sqrt(old / tl.where(turning, new, 1.0))
    tl.store(scales + number, tl.where(turning, turned, 1.0).to(tl.float32))


@triton.jit
def scale_kernel(pieces, tiles, scales):
    """Multiplies the weights of a block by a number."""
    piece, number, _, _, mask, at = _find_tile(pieces, tiles)
    place = _pointer(piece, 0) + at
    tl.store(place, tl.load(place, mask, 0.0) * tl.load(scales + number), mask)


@triton.jit
def sum_kernel(partial, firsts, numbers, sums, AT_ONCE: tl.constexpr):
    """Adds up what was found of a block's tiles."""
    k, column = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(firsts + k), tl.load(firsts + k + 1)
    total = tl.zeros((AT_ONCE,), tl.float64)
    for tile in range(start, stop, AT_ONCE):
        at = tile + tl.arange(0, AT_ONCE)
        total += tl.load(partial + SUMS * at + column, at < stop, 0.0)
    tl.store(sums + SUMS * tl.load(numbers + k) + column, tl.sum(total, 0))
