"""The weights of a node's edges as a tensor: a parameter, or a product of it with fixed factors."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from pathsgd.graph.nodes import Shape, Stored, Weight
from pathsgd.graph.views import view_tensor

Tensors = Mapping[str, Tensor]


def signed_weights(weight: Weight, tensors: Tensors, dtype: torch.dtype = torch.float64) -> Tensor:
    """Parameter times fixed factors. A parameter alone keeps its own dtype: blocks of it are converted
    later."""
    if weight.parameter is not None and not weight.factors and not weight.parameter.shift:
        return _view(weight.parameter, _read(weight.parameter, tensors, None))
    stored = weight.factors if weight.parameter is None else (*weight.factors, weight.parameter)
    product = functools.reduce(torch.mul, [_view(each, _read(each, tensors, dtype)) for each in stored])
    return product.expand(weight.shape)


def _read(stored: Stored, tensors: Tensors, dtype: torch.dtype | None) -> Tensor:
    """The tensor that a stored one is a view of."""
    if stored.literal:
        device = next(iter(tensors.values())).device
        shape = (-1,) if stored.views else stored.shape
        return _make_literal(stored.literal, shape, dtype or torch.get_default_dtype(), device)
    tensor = tensors[stored.name]
    tensor = tensor if dtype is None else tensor.to(dtype)
    tensor = tensor + stored.shift if stored.shift else tensor
    return tensor if stored.inverse_sigma is None else (tensor + stored.inverse_sigma).rsqrt()


@functools.cache
def _make_literal(
    numbers: tuple[float, ...], shape: Shape, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Numbers written in the model's code, copied to the device once, and kept: a CUDA graph may read
    them."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device).reshape(shape)


def _view(stored: Stored, base: Tensor) -> Tensor:
    for view in stored.views:
        base = view_tensor(view, base)
    return 1 / base if stored.inverse else base
