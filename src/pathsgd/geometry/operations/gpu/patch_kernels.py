"""The matrix of patches of one image, (channels and taps, places): what each tap sees from each place. Filled
from the image, and summed back into it. Each program has some entries of the result."""

import triton
import triton.language as tl

ENTRIES: tl.constexpr = tl.constexpr(512)
"""Of a program."""
INTEGERS = [
    "channels", "height", "width", "rows", "columns", "taps_y", "taps_x", "x_channel", "x_y", "x_x",
    "stride_y", "stride_x", "padding_y", "padding_x", "dilation_y", "dilation_x",
]  # fmt: skip
"""Compiled once for all of them. Places are ``rows x columns``."""


@triton.jit(do_not_specialize=INTEGERS)
def gather_kernel(
    x, patches, channels, height, width, rows, columns, taps_y, taps_x, x_channel, x_y, x_x,
    stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """``patches[channel, tap, place] = x[channel, place and tap]``, zero beyond the borders. Channels come
    after taps if they are last."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    places, taps = rows * columns, taps_y * taps_x
    k, place = entry // places, entry % places
    if CHANNELS_LAST:
        channel, tap = k % channels, k // channels
    else:
        channel, tap = k // taps, k % taps
    row = place // columns * stride_y + tap // taps_x * dilation_y - padding_y
    column = place % columns * stride_x + tap % taps_x * dilation_x - padding_x
    known = k < channels * taps
    inside = known & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    tl.store(patches + entry, tl.load(x + channel * x_channel + row * x_y + column * x_x, inside, 0.0), known)


@triton.jit(do_not_specialize=INTEGERS)
def fold_kernel(
    patches, x, channels, height, width, rows, columns, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr,
    stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """The adjoint: ``x[channel, place and tap]`` is the sum of ``patches[channel, tap, place]``, in the order
    of taps. Compiled for their number, so that no load waits for the one before."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    channel, y, z = entry // (height * width), entry // width % height, entry % width
    known = channel < channels
    total = tl.zeros((ENTRIES,), tl.float32)
    for tap_y in tl.static_range(TAPS_Y):
        row = y + padding_y - tap_y * dilation_y
        in_row = known & (row >= 0) & (row % stride_y == 0) & (row // stride_y < rows)
        for tap_x in tl.static_range(TAPS_X):
            column = z + padding_x - tap_x * dilation_x
            inside = in_row & (column >= 0) & (column % stride_x == 0) & (column // stride_x < columns)
            tap = tap_y * TAPS_X + tap_x
            if CHANNELS_LAST:
                k = tap * channels + channel
            else:
                k = channel * (TAPS_Y * TAPS_X) + tap
            place = row // stride_y * columns + column // stride_x
            total += tl.load(patches + k * (rows * columns) + place, inside, 0.0)
    tl.store(x + entry, total, known)
