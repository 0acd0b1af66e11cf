"""``y = scale x + shift`` channel by channel, and its adjoints, each in one pass: torch's batch norm gives to
each channel 512 threads, of which one image leaves most idle. Results have zeros around them where a
convolution reads them next."""

import triton
import triton.language as tl

from pathsgd.geometry.operations.gpu.conv_kernels import ENTRIES

INTEGERS = ["images", "channels", "height", "width", "rows", "columns", "border_y", "border_x"]
"""Compiled once for all of them. ``rows x columns`` is the image with its border."""


@triton.jit(do_not_specialize=INTEGERS)
def norm_kernel(x, scale, shift, y, channels, height, width, rows, columns, border_y, border_x):
    """Of one image."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    channel = entry // (rows * columns)
    row, column = entry // columns % rows - border_y, entry % columns - border_x
    known = channel < channels
    inside = known & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    value = tl.load(x + (channel * height + row) * width + column, inside, 0.0)
    value = tl.fma(value, tl.load(scale + channel, inside, 0.0), tl.load(shift + channel, inside, 0.0))
    tl.store(y + entry, value, known)


@triton.jit(do_not_specialize=INTEGERS)
def norm_adjoint_kernel(
    gradient, x, scale, back, by_scale, by_shift, images, channels, height, width, rows, columns, border_y,
    border_x, CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """``back = scale gradient``, and by channel the sums of ``gradient x`` and of ``gradient``, for some
    channels of tensors (images, channels, height, width)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    factor = tl.load(scale + channel, known, 0.0)[:, None]
    of_scale, of_shift = tl.zeros_like(factor), tl.zeros_like(factor)
    for image in range(images):
        slice = (image * channels + channel)[:, None]
        for start in range(0, rows * columns, PLACES):
            place = start + tl.arange(0, PLACES)[None, :]
            row, column = place // columns - border_y, place % columns - border_x
            inside = known[:, None] & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            at = (slice * height + row) * width + column
            g = tl.load(gradient + at, inside, 0.0)
            tl.store(
                back + slice * (rows * columns) + place, g * factor, known[:, None] & (place < rows * columns)
            )
            of_scale += tl.sum(g * tl.load(x + at, inside, 0.0), 1, keep_dims=True)
            of_shift += tl.sum(g, 1, keep_dims=True)
    at = channel[:, None]
    tl.store(by_scale + at, of_scale, known[:, None])
    tl.store(by_shift + at, of_shift, known[:, None])
