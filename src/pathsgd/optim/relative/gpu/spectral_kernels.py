"""One power iteration for all matrices at once, whatever their shapes; as spectral.py does it.

The fields of a matrix are where its entries begin, its rows and columns, where its vectors y and x begin,
where what is found of A^T y by bands of rows begins, and the number of its block.
"""

import triton
import triton.language as tl

FIELDS: tl.constexpr = tl.constexpr(7)
ROWS: tl.constexpr = tl.constexpr(8)
COLUMNS: tl.constexpr = tl.constexpr(256)
"""Of a tile."""
BAND: tl.constexpr = tl.constexpr(128)
"""Rows that one program adds up for A^T y."""
TOGETHER: tl.constexpr = tl.constexpr(8)
WIDTH: tl.constexpr = tl.constexpr(1024)
"""Bands, and entries of a vector, that are read at a time at the end."""


@triton.jit
def _load_shape(fields):
    return tl.load(fields + 1).to(tl.int32), tl.load(fields + 2).to(tl.int32)


@triton.jit
def _load_tile(fields, directions, i, c):
    rows, columns = _load_shape(fields)
    known = (i < rows)[:, None] & (c < columns)[None, :]
    return tl.load(directions + tl.load(fields) + i[:, None] * columns + c[None, :], known, 0.0)


@triton.jit
def forward_kernel(matrices, places, directions, x, y):
    """y = A x: some rows, named by (matrix, first row)."""
    fields = matrices + FIELDS * tl.load(places + 2 * tl.program_id(0))
    i = tl.load(places + 2 * tl.program_id(0) + 1) + tl.arange(0, ROWS)
    rows, columns = _load_shape(fields)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, columns, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        own = tl.load(x + tl.load(fields + 4) + c, c < columns, 0.0)
        total += _load_tile(fields, directions, i, c) * own[None, :]
    tl.store(y + tl.load(fields + 3) + i, tl.sum(total, 1), i < rows)


@triton.jit
def backward_kernel(matrices, places, directions, y, parts):
    """A^T y over a band of rows: some columns, named by (matrix, band, first column)."""
    place = places + 3 * tl.program_id(0)
    fields, band = matrices + FIELDS * tl.load(place), tl.load(place + 1)
    c = tl.load(place + 2) + tl.arange(0, COLUMNS)
    rows, columns = _load_shape(fields)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(band * BAND, tl.minimum((band + 1) * BAND, rows), ROWS):
        i = start + tl.arange(0, ROWS)
        own = tl.load(y + tl.load(fields + 3) + i, i < rows, 0.0)
        total += _load_tile(fields, directions, i, c) * own[:, None]
    tl.store(parts + tl.load(fields + 5) + band * columns + c, tl.sum(total, 0), c < columns)


@triton.jit
def finish_kernel(matrices, x, y, parts, norms):
    """The norm of one matrix, |A^T y| / |y|, and x = A^T y / |A^T y|. A matrix of zeros keeps its vector, and
    its norm is 1 here, to divide by."""
    fields = matrices + FIELDS * tl.program_id(0)
    rows, columns = _load_shape(fields)
    x, y, parts = x + tl.load(fields + 4), y + tl.load(fields + 3), parts + tl.load(fields + 5)
    lane = tl.arange(0, WIDTH)
    before = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, rows, WIDTH):
        own = tl.load(y + start + lane, start + lane < rows, 0.0)
        before += own * own
    after = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, columns, WIDTH):
        c = start + lane
        total = tl.zeros((TOGETHER, WIDTH), tl.float32)
        for first in range(0, tl.cdiv(rows, BAND), TOGETHER):
            band = first + tl.arange(0, TOGETHER)
            known = (band < tl.cdiv(rows, BAND))[:, None] & (c < columns)[None, :]
            total += tl.load(parts + band[:, None] * columns + c[None, :], known, 0.0)
        back = tl.sum(total, 0)
        after += back * back
        tl.debug_barrier()  # all have read what the first band is overwritten with
        tl.store(parts + c, back, c < columns)
    size, norm = tl.sqrt_rn(tl.sum(after, 0)), 1.0
    tl.debug_barrier()
    if size > 0:
        norm = size / tl.sqrt_rn(tl.sum(before, 0))
        for start in range(0, columns, WIDTH):
            c = start + lane
            tl.store(x + c, tl.load(parts + c, c < columns, 0.0) / size, c < columns)
    tl.store(norms + tl.load(fields + 6), norm)
