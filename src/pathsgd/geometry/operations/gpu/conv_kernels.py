"""Convolutions of one image and their adjoints: what each tap sees at each place is gathered, and a matrix is
multiplied with it, of weights or of what flows back.

Products have the precision of fp32 on tensor cores: each factor is the sum of two numbers, the first of 11
bits, and three of the four products of these are added. Tensor cores cut off what they cannot hold instead of
rounding it, which makes every sum of 32 positive terms too small by 2^-23 on average: ``ROUND_UP`` gives it
back.
"""

import triton
import triton.language as tl

STEP: tl.constexpr = tl.constexpr(32)
"""Terms of a sum that tensor cores add at a time."""
ROUND_UP: tl.constexpr = tl.constexpr(1 + 2**-23)
INTEGERS = [
    "channels", "height", "width", "places", "columns", "lines", "terms", "x_channel", "x_row", "x_column",
    "first_y", "first_x", "place_y", "place_x", "tap_y", "tap_x", "gap_y", "gap_x", "share", "splits",
]  # fmt: skip
"""Whose values do not make Triton compile again. Those that vector loads of weights depend on do."""


@triton.jit
def _round(x):
    """The nearest number of 11 bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + (1 << 12)) & -(1 << 13)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=["x"])
def gather_kernel(
    x, high, low, channels, height, width, places, columns, lines, filled, x_channel, x_row, x_column,
    first_y, first_x, place_y, place_x, tap_y, tap_x, gap_y, gap_x,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, CHANNELS_LAST: tl.constexpr, BY_PLACE: tl.constexpr,
    GAPS: tl.constexpr, LINES: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """What is seen, ``high + low``, each by (place, term) or (term, place): so many lines, with zeros up to
    ``filled``. Terms are (channel, tap) or, ``CHANNELS_LAST``, (tap, channel). Places and taps are so many
    rows and columns apart, and there may be gaps between those of the image."""
    line = (tl.program_id(0) * LINES + tl.arange(0, LINES))[:, None]
    across = (tl.program_id(1) * ACROSS + tl.arange(0, ACROSS))[None, :]
    place = line if BY_PLACE else across
    term = across if BY_PLACE else line
    if CHANNELS_LAST:
        channel, tap = term % channels, term // channels
    else:
        channel, tap = term // (TAPS_Y * TAPS_X), term % (TAPS_Y * TAPS_X)
    row = first_y + place // columns * place_y + tap // TAPS_X * tap_y
    column = first_x + place % columns * place_x + tap % TAPS_X * tap_x
    inside = (place < places) & (tap < TAPS_Y * TAPS_X) & (channel < channels) & (row >= 0) & (column >= 0)
    if GAPS:
        inside = inside & (row % gap_y == 0) & (column % gap_x == 0)
        row, column = row // gap_y, column // gap_x
    inside = inside & (row < height) & (column < width)
    value = tl.load(x + channel * x_channel + row * x_row + column * x_column, inside, 0.0)
    rounded = _round(value)
    at, known = line * filled + across, (line < lines) & (across < filled)
    tl.store(high + at, rounded, known)
    tl.store(low + at, value - rounded, known)


@triton.jit(do_not_specialize=INTEGERS)
def product_kernel(
    high, low, matrix, parts, rows, terms, columns, filled, m_row, m_channel, m_tap, share,
    TAPS: tl.constexpr, SQUARE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``parts[split, row, column]``, the sum over ``share`` steps of terms (channel, tap) of the matrix, or
    its squares, times ``(high + low)[column]``. ``EVEN``: terms fill whole steps."""
    across = tl.cdiv(columns, COLUMNS)
    tile, split = tl.program_id(0), tl.program_id(1)
    row = (tile // across * ROWS + tl.arange(0, ROWS))[:, None]
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    sees, seen = (column * filled)[None, :], (column < columns)[None, :]
    own, known = matrix + row * m_row, row < rows
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(split * share, tl.minimum(tl.cdiv(terms, STEP), (split + 1) * share)):
        term = tl.arange(0, STEP) + step * STEP
        at = term // TAPS * m_channel + term % TAPS * m_tap
        there = known if EVEN else known & (term < terms)[None, :]
        m = tl.load(own + at[None, :], there, 0.0).to(tl.float32)
        x_high = tl.load(high + sees + term[:, None], seen, 0.0)
        x_low = tl.load(low + sees + term[:, None], seen, 0.0)
        if SQUARE:
            m = m * m
        m_high = _round(m)
        part = tl.dot(m - m_high, x_high, input_precision="tf32")
        part = tl.dot(m_high, x_low, part, input_precision="tf32")
        part = tl.dot(m_high, x_high, part, input_precision="tf32")
        total = tl.fma(part, tl.full(total.shape, ROUND_UP, tl.float32), total)
    at = (split * rows + row) * columns + column[None, :]
    tl.store(parts + at, total, known & (column < columns)[None, :])


@triton.jit(do_not_specialize=INTEGERS)
def add_kernel(parts, total, entries, splits, ENTRIES: tl.constexpr):
    """The sum of the parts, in their order."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    known = at < entries
    part = parts + at
    found = tl.load(part, known, 0.0)
    for _ in range(1, splits):
        part += entries
        found += tl.load(part, known, 0.0)
    tl.store(total + at, found, known)
