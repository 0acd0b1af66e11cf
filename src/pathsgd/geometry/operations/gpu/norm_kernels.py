"""The adjoints of ``y = scale x + shift`` in one pass. torch's batch norm gives 512 threads to each channel,
of which one image leaves most idle."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["images", "channels", "places"])
def norm_adjoint_kernel(
    gradient, x, scale, back, by_scale, by_shift, images, channels, places,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """``back = scale gradient``, and by channel the sums of ``gradient x`` and of ``gradient``, for some
    channels of tensors (images, channels, places)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    factor = tl.load(scale + channel, known, 0.0)[:, None]
    of_scale, of_shift = tl.zeros_like(factor), tl.zeros_like(factor)
    for image in range(images):
        row = ((image * channels + channel) * places)[:, None]
        for start in range(0, places, PLACES):
            place = start + tl.arange(0, PLACES)[None, :]
            inside = known[:, None] & (place < places)
            g = tl.load(gradient + row + place, inside, 0.0)
            tl.store(back + row + place, g * factor, inside)
            of_scale += tl.sum(g * tl.load(x + row + place, inside, 0.0), 1, keep_dims=True)
            of_shift += tl.sum(g, 1, keep_dims=True)
    at = channel[:, None]
    tl.store(by_scale + at, of_scale, known[:, None])
    tl.store(by_shift + at, of_shift, known[:, None])
