"""Convolutions of the powered network: sums by torch's kernels, or on a GPU by ours, maxima tap by tap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pathsgd._torch import are_plain, is_plain
from pathsgd.geometry.devices import has_tensor_cores
from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat
from pathsgd.geometry.operations.contraction import fits_one_frame
from pathsgd.geometry.operations.exponent_folding import fold_exponents
from pathsgd.geometry.sharded import conv_shards, local_part, own_ends
from pathsgd.graph.image_convolutions import is_of_one_image
from pathsgd.graph.nodes import Conv, Shape
from pathsgd.graph.sharded import is_sharded


def conv(arithmetic: Arithmetic, operation: Conv, x: ExtendedFloat, weight: Tensor) -> ExtendedFloat:
    """A convolution (or its transpose) in the powered network."""
    if is_sharded(weight):
        return conv_shards(conv, arithmetic, operation, x, weight)
    if x.exponent is None:
        return ExtendedFloat(_convolve(arithmetic, operation, x.mantissa, weight))
    weight = arithmetic.cast(weight)
    x = arithmetic.align(x, [d for d in range(x.mantissa.dim()) if d != 1])
    found = None
    if weight.device.type == "cpu" and are_plain([weight, x.mantissa]):
        # In one layout: another kernel would take sums in another order.
        weight = weight.flatten().view(weight.shape)
        found = _conv_in_one_frame(arithmetic, operation, x, weight)
    return found or _conv_by_unit(arithmetic, operation, x, weight)


def _convolve(arithmetic: Arithmetic, operation: Conv, x: Tensor, weight: Tensor) -> Tensor:
    size = _output_size(operation, tuple(x.shape[2:]))
    by_kernel = not math.isinf(arithmetic.p) and _has_kernel(operation, x, size, weight)
    squares = by_kernel and arithmetic.p == 2 and not arithmetic.as_given
    edges = weight if squares else arithmetic.power(arithmetic.cast(weight))
    if math.isinf(arithmetic.p):
        return max_conv(operation, x, edges)
    if by_kernel:
        from pathsgd.geometry.operations.gpu.image_convolution import convolve

        return convolve(operation, x, edges, size, square=squares)
    if _flows_back(operation, x, edges):
        return _flow_back(operation, x, edges, size)
    return torch.convolution(
        x, edges, None, operation.stride, operation.padding, operation.dilation, operation.transposed,
        operation.output_padding, operation.groups,
    )  # fmt: skip


def _conv_in_one_frame(
    arithmetic: Arithmetic, operation: Conv, x: ExtendedFloat, weight: Tensor
) -> ExtendedFloat | None:
    """As :func:`contraction._contract_in_one_frame`; not on a GPU, where the host would wait for it."""
    assert x.exponent is not None
    frame = x.exponent.amax(1, keepdim=True)
    inputs = arithmetic.shift(x.mantissa, x.exponent - frame)
    y = _convolve(arithmetic, operation, inputs, weight)
    if not fits_one_frame(x, inputs, y):
        return None
    if bool((y == 0).any()):
        plain = Arithmetic(1.0, arithmetic.dtype)
        alive = [(each != 0).to(arithmetic.dtype) for each in (x.mantissa, weight)]
        if bool(((y == 0) & (_convolve(plain, operation, *alive) > 0)).any()):
            return None
    return arithmetic.keep_in_range(ExtendedFloat(y, frame.expand(-1, y.shape[1], *frame.shape[2:])))


def _conv_by_unit(arithmetic: Arithmetic, operation: Conv, x: ExtendedFloat, weight: Tensor) -> ExtendedFloat:
    """With an exponent for every output, folded into the weights before the power."""
    assert x.exponent is not None
    ones = (1,) * (x.mantissa.dim() - 2)
    channels = x.mantissa.shape[1]
    tail = x.exponent.expand(1, channels, *ones).reshape(channels)
    rows, head = fold_exponents(arithmetic, by_output(operation, weight), tail_of(operation, tail, weight))
    edges = from_output(operation, rows, tuple(weight.shape))
    if edges.device.type == "cpu" and is_plain(edges):
        # Laid out as the weight is, so that sums are taken in the order of those in one frame.
        edges = torch.empty_like(weight).copy_(edges)
    y = _convolve(replace(arithmetic, as_given=True), operation, x.mantissa, edges)
    return arithmetic.keep_in_range(ExtendedFloat(y, head.reshape(1, -1, *ones)))


def _flows_back(operation: Conv, x: Tensor, edges: Tensor) -> bool:
    """Whether a transposed convolution is computed as what flows back in a convolution: on a CPU torch does
    that in half the time."""
    if not operation.transposed or x.device.type != "cpu" or not (is_plain(x) and is_plain(edges)):
        return False
    return all(n < stride for n, stride in zip(operation.output_padding, operation.stride, strict=True))


def _flow_back(operation: Conv, x: Tensor, edges: Tensor, size: Shape) -> Tensor:
    none = (0,) * len(operation.stride)
    result = x.new_empty(len(x), edges.shape[1] * operation.groups, *size)
    y, _, _ = torch.ops.aten.convolution_backward(
        x, result, edges, None, operation.stride, operation.padding, operation.dilation, False, none,
        operation.groups, (True, False, False),
    )  # fmt: skip
    return y


def _has_kernel(operation: Conv, x: Tensor, size: Shape, other: Tensor) -> bool:
    """Whether kernels of ours compute a convolution of x, or its transpose; ``size`` is that of the
    result."""
    if x.dtype != torch.float32 or not (is_plain(x) and is_plain(other)):
        return False
    return has_tensor_cores(x.device) and is_of_one_image(operation, tuple(x.shape), size)


def transpose_conv(operation: Conv, into: Shape, out: Shape) -> Conv:
    """The adjoint of a convolution: its transpose, and the other way round, with the same weight."""
    none = (0,) * len(operation.stride)
    flipped = replace(operation, transposed=not operation.transposed, output_padding=none)
    if operation.transposed:
        return flipped
    natural = _output_size(flipped, out[2:])
    return replace(flipped, output_padding=tuple(n - m for n, m in zip(into[2:], natural, strict=True)))


def by_output(operation: Conv, weight: Tensor) -> Tensor:
    """The weight with its output channels on axis 0: ``(outputs, inputs / groups, *taps)``."""
    if not operation.transposed:
        return weight
    g = operation.groups
    inputs, outputs, *taps = weight.shape
    grouped = weight.reshape(g, inputs // g, outputs, *taps).transpose(1, 2)
    return grouped.reshape(g * outputs, inputs // g, *taps)


def from_output(operation: Conv, rows: Tensor, shape: Shape) -> Tensor:
    """The inverse of :func:`by_output`."""
    if not operation.transposed:
        return rows
    g = operation.groups
    inputs, outputs, *taps = shape
    return rows.reshape(g, outputs, inputs // g, *taps).transpose(1, 2).reshape(shape)


def tail_of(operation: Conv, per_channel: Tensor, weight: Tensor) -> Tensor:
    """One number per input channel, laid along the rows of :func:`by_output`."""
    g = operation.groups
    taps = (1,) * (weight.dim() - 2)
    outputs = weight.shape[1] * g if operation.transposed else weight.shape[0]
    if g == 1:
        return per_channel.reshape(1, -1, *taps)
    grouped = per_channel.reshape(g, 1, -1).expand(g, outputs // g, -1)
    return grouped.reshape(outputs, -1, *taps)


def conv_weight_adjoint(
    arithmetic: Arithmetic, operation: Conv, x: ExtendedFloat, gradient: ExtendedFloat, weight: Tensor
) -> ExtendedFloat:
    """``dF / d|W|^p``: for every weight, the path weight through all the places it is used at."""
    ndim = x.mantissa.dim()
    gradient, x = own_ends(weight, gradient, x, 1, outputs=1 if operation.transposed else 0)
    weight = local_part(weight)
    rest = [d for d in range(ndim) if d != 1]
    x, gradient = arithmetic.align(x, rest), arithmetic.align(gradient, rest)
    if math.isinf(arithmetic.p):
        value = _max_weight_adjoint(operation, x.mantissa, gradient.mantissa, weight)
    elif not operation.transposed and _has_kernel(
        operation, x.mantissa, tuple(gradient.mantissa.shape[2:]), gradient.mantissa
    ):
        from pathsgd.geometry.operations.gpu.image_convolution import adjoin_weight

        value = adjoin_weight(operation, x.mantissa, gradient.mantissa, weight)
    else:
        _, value, _ = torch.ops.aten.convolution_backward(
            gradient.mantissa, x.mantissa, weight.to(arithmetic.dtype), None, operation.stride,
            operation.padding, operation.dilation, operation.transposed, operation.output_padding,
            operation.groups, (False, True, False),
        )  # fmt: skip
    if x.exponent is None or gradient.exponent is None:
        return ExtendedFloat(value)
    channels = x.mantissa.shape[1]
    into = x.exponent.expand(1, channels, *(1,) * (ndim - 2)).reshape(-1)
    outputs = gradient.mantissa.shape[1]
    out = gradient.exponent.expand(1, outputs, *(1,) * (ndim - 2)).reshape(-1)
    tail = tail_of(operation, into, weight)
    head = out.reshape(-1, *(1,) * (weight.dim() - 1))
    per_pair = tail + head
    shape = (*weight.shape[:2], *(1,) * (weight.dim() - 2))
    return arithmetic.normalise_now(ExtendedFloat(value, from_output(operation, per_pair, shape)))


# p = inf: a maximum over taps and channels, where torch has no kernel


def _taps(
    operation: Conv, small: Shape, large: Shape
) -> Iterator[tuple[Shape, tuple[slice, ...], tuple[slice, ...]]]:
    """For every tap, the places of the small grid and the places of the large grid it joins.

    The small grid is a convolution's output and the large one its input; transposed the other way.
    """
    kernel = operation.weight.shape[2:]
    for tap in itertools.product(*map(range, kernel)):
        here, there = [], []
        for k, t in enumerate(tap):
            stride, offset = operation.stride[k], t * operation.dilation[k] - operation.padding[k]
            first = max(-(offset // stride) if offset < 0 else 0, 0)
            last = min((large[k] - 1 - offset) // stride, small[k] - 1)
            here.append(slice(first, max(last + 1, first)))
            start = first * stride + offset
            stop = max(last * stride + offset + 1, start)
            there.append(slice(start, stop, stride))
        if all(s.stop > s.start for s in here):
            yield tap, tuple(here), tuple(there)


def at(x: Tensor, places: tuple[int, ...] | tuple[slice, ...]) -> Tensor:
    """A view of ``x`` at these places of its last axes."""
    index: tuple[Any, ...] = (Ellipsis, *places)
    return x[index]


def max_conv(operation: Conv, x: Tensor, edges: Tensor) -> Tensor:
    """A convolution whose sums are maxima."""
    rows = by_output(operation, edges)
    g = operation.groups
    spatial_in = tuple(x.shape[2:])
    spatial_out = _output_size(operation, spatial_in)
    y = x.new_zeros(x.shape[0], rows.shape[0], *spatial_out)
    grouped = x.reshape(x.shape[0], g, 1, -1, *spatial_in)
    small, large = (spatial_in, spatial_out) if operation.transposed else (spatial_out, spatial_in)
    for tap, on_small, on_large in _taps(operation, small, large):
        source, target = (on_small, on_large) if operation.transposed else (on_large, on_small)
        weights = at(rows, tap).reshape(1, g, -1, rows.shape[1], *(1,) * len(spatial_in))
        best = (at(grouped, source) * weights).amax(3)
        part = at(y, target)
        part.copy_(torch.maximum(part.clone(), best.reshape(part.shape)))
    return y


def _output_size(operation: Conv, size: Shape) -> Shape:
    kernel = operation.weight.shape[2:]
    sizes = []
    for k, n in enumerate(size):
        reach = operation.dilation[k] * (kernel[k] - 1) + 1
        if operation.transposed:
            out = (n - 1) * operation.stride[k] - 2 * operation.padding[k] + reach
            sizes.append(out + operation.output_padding[k])
        else:
            sizes.append((n + 2 * operation.padding[k] - reach) // operation.stride[k] + 1)
    return tuple(sizes)


def _max_weight_adjoint(operation: Conv, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    g = operation.groups
    spatial_in, spatial_out = tuple(x.shape[2:]), tuple(gradient.shape[2:])
    rows = by_output(operation, weight)
    best = x.new_zeros(rows.shape)
    into = x.reshape(x.shape[0], g, 1, -1, *spatial_in)
    out = gradient.reshape(x.shape[0], g, -1, 1, *spatial_out)
    small, large = (spatial_in, spatial_out) if operation.transposed else (spatial_out, spatial_in)
    for tap, on_small, on_large in _taps(operation, small, large):
        source, target = (on_small, on_large) if operation.transposed else (on_large, on_small)
        pairs = at(into, source) * at(out, target)
        reduced = pairs.amax(dim=(0, *range(4, pairs.dim())))
        at(best, tap).copy_(reduced.reshape(rows.shape[:2]))
    return from_output(operation, best, tuple(weight.shape))
