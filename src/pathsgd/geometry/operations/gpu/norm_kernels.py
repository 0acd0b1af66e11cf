"""The adjoints of ``y = scale x + shift`` channel by channel, in one pass: torch's batch norm gives to each
channel 512 threads, of which one image leaves most idle."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["images", "channels", "places"])
def norm_adjoint_kernel(
    gradient, x, scale, back, by_scale, by_shift, images, channels, places,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """``back = scale gradient``, and by channel the sums of ``gradient x`` and of ``gradient``, for some
    channels of tensors (images, channels, places)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    known = channel < channels
    factor = tl.load(scale + channel, known, 0.0)
    of_scale, of_shift = tl.zeros_like(factor), tl.zeros_like(factor)
    for image in range(images):
        for start in range(0, places, PLACES):
            place = start + tl.arange(0, PLACES)[None, :]
            inside = known & (place < places)
            at = (image * channels + channel) * places + place
            g = tl.load(gradient + at, inside, 0.0)
            tl.store(back + at, g * factor, inside)
            of_scale += tl.sum(g * tl.load(x + at, inside, 0.0), 1, keep_dims=True)
            of_shift += tl.sum(g, 1, keep_dims=True)
    tl.store(by_scale + channel, of_scale, known)
    tl.store(by_shift + channel, of_shift, known)
