"""Convolutions of one image: forward, back to the image, and to the weights, each as one matrix product whose
entries are read where they lie.

Products are those of fp32 on tensor cores: each factor is the sum of two numbers of 11 bits, and three of the
four products of these are added. Tensor cores cut off what they cannot hold instead of rounding it, which
makes every sum of 32 positive terms too small by 2^-23 on average: it is given back by ``ROUND_UP``.
"""

import triton
import triton.language as tl

STEP: tl.constexpr = tl.constexpr(32)
"""Terms of a sum that tensor cores add at a time."""
ROUND_UP: tl.constexpr = tl.constexpr(1 + 2**-23)
ENTRIES: tl.constexpr = tl.constexpr(512)
"""Of a program that copies or adds."""
INTEGERS = [
    "channels", "height", "width", "rows", "columns", "border_y", "border_x", "stride_y", "stride_x",
    "x_channel", "x_row", "x_column", "x_tap_y", "x_tap_x", "origin", "g_output", "g_row",
    "share", "splits", "entries",
]  # fmt: skip
"""Whose values do not make Triton compile again. Those that vector loads of weights depend on do."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=["x"])
def spread_kernel(
    x, spread, channels, height, width, rows, columns, x_channel, x_row, x_column, border_y, border_x,
    stride_y, stride_x,
):  # fmt: skip
    """The image with zeros around it, and between its places if it has strides."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    channel = entry // (rows * columns)
    row, column = entry // columns % rows - border_y, entry % columns - border_x
    known = channel < channels
    inside = known & (row >= 0) & (column >= 0) & (row % stride_y == 0) & (column % stride_x == 0)
    row, column = row // stride_y, column // stride_x
    inside = inside & (row < height) & (column < width)
    at = channel * x_channel + row * x_row + column * x_column
    tl.store(spread + entry, tl.load(x + at, inside, 0.0), known)


@triton.jit
def _split_terms(k, channels, TAPS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """(channel, tap) of each term."""
    if TAPS == 1:
        return k, 0 * k
    if CHANNELS_LAST:
        return k % channels, k // channels
    return k // TAPS, k % TAPS


@triton.jit
def _add_product(total, a, b):
    return tl.fma(tl.dot(a, b, input_precision="tf32x3"), tl.full(total.shape, ROUND_UP, tl.float32), total)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=["x"])
def conv_kernel(
    x, weight, parts, outputs, channels, rows, columns, origin, x_row, x_column, x_channel, x_tap_y, x_tap_x,
    w_output, w_channel, w_tap, share,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, IN_ORDER: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    SQUARE: tl.constexpr, EVEN: tl.constexpr, OUTPUTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """``parts[split, output, place]``, the sum over ``share`` steps of terms (channel, tap) of the weight, or
    its square, times what the tap sees. ``IN_ORDER``: terms follow each other as the weights of an output lie
    in memory; ``EVEN``: they fill whole steps."""
    places, terms = rows * columns, channels * (TAPS_Y * TAPS_X)
    across = tl.cdiv(places, PLACES)
    tile, split = tl.program_id(0), tl.program_id(1)
    output = (tile // across * OUTPUTS + tl.arange(0, OUTPUTS))[:, None]
    place = (tile % across * PLACES + tl.arange(0, PLACES))[None, :]
    here = tl.minimum(place, places - 1)
    sees = x + (origin + here // columns * x_row + here % columns * x_column)
    weighs, known = weight + output * w_output, output < outputs
    total = tl.zeros((OUTPUTS, PLACES), tl.float32)
    for step in range(split * share, tl.minimum(tl.cdiv(terms, STEP), (split + 1) * share)):
        term = step * STEP + tl.arange(0, STEP)
        k = term if EVEN else tl.minimum(term, terms - 1)
        channel, tap = _split_terms(k, channels, TAPS_Y * TAPS_X, CHANNELS_LAST)
        at = k if IN_ORDER else channel * w_channel + tap * w_tap
        w = tl.load(weighs + at[None, :], known, 0.0).to(tl.float32)
        if SQUARE:
            w = w * w
        if not EVEN:
            w = tl.where((term < terms)[None, :], w, 0.0)
        at = channel * x_channel + tap // TAPS_X * x_tap_y + tap % TAPS_X * x_tap_x
        total = _add_product(total, w, tl.load(sees + at[:, None]))
    tl.store(parts + (split * outputs + output) * places + place, total, known & (place < places))


@triton.jit(do_not_specialize=INTEGERS)
def add_kernel(parts, total, entries, splits):
    """The sum of the parts, in their order."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    known = at < entries
    part = parts + at
    found = tl.load(part, known, 0.0)
    for _ in range(1, splits):
        part += entries
        found += tl.load(part, known, 0.0)
    tl.store(total + at, found, known)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=["x", "gradient"])
def weight_kernel(
    x, gradient, parts, outputs, channels, rows, columns, origin, x_row, x_column, x_channel, x_tap_y,
    x_tap_x, g_output, g_row, share,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, CHANNELS_LAST: tl.constexpr, OUTPUTS: tl.constexpr,
    TERMS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """``parts[split, output, channel, tap]``, each laid out as the weight is: the sum over ``share`` steps of
    places of the gradient times what the tap sees."""
    places, terms = rows * columns, channels * (TAPS_Y * TAPS_X)
    across = tl.cdiv(terms, TERMS)
    tile, split = tl.program_id(0), tl.program_id(1)
    output = (tile // across * OUTPUTS + tl.arange(0, OUTPUTS))[:, None]
    k = tile % across * TERMS + tl.arange(0, TERMS)
    channel, tap = _split_terms(tl.minimum(k, terms - 1), channels, TAPS_Y * TAPS_X, CHANNELS_LAST)
    sees = x + (origin + channel * x_channel + tap // TAPS_X * x_tap_y + tap % TAPS_X * x_tap_x)[None, :]
    flows, known = gradient + output * g_output, output < outputs
    total = tl.zeros((OUTPUTS, TERMS), tl.float32)
    for step in range(split * share, tl.minimum(tl.cdiv(places, PLACES), (split + 1) * share)):
        place = step * PLACES + tl.arange(0, PLACES)
        inside = place < places
        place = tl.minimum(place, places - 1)
        row, column = place // columns, place % columns
        g = tl.load(flows + (row * g_row + column)[None, :], known & inside[None, :], 0.0)
        at = row * x_row + column * x_column
        total = _add_product(total, g, tl.load(sees + at[:, None]))
    tl.store(parts + (split * outputs + output) * terms + k[None, :], total, known & (k < terms)[None, :])
