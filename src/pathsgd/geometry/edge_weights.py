"""From the weights a graph names to tensors, and back from edges to parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat
from pathsgd.geometry.operations.movement import move
from pathsgd.graph.data_movement import move_tensor
from pathsgd.graph.nodes import Embed, Expand, Permute, Reshape, Shape, Slice, Stored, Weight

Tensors = Mapping[str, Tensor]


def stored_tensor(stored: Stored, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    """A tensor of the model (or a literal) as the graph sees it."""
    if not stored.literal and stored.inverse_sigma is None:
        # As it is: a parameter of low precision is taken to fp32 in blocks by those who can.
        return seen_through(stored, tensors[stored.name], dtype)
    return seen_through(stored, base_tensor(stored, tensors, dtype), dtype)


def base_tensor(stored: Stored, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    """The tensor that a stored one is a view of."""
    if stored.literal:
        like = next(iter(tensors.values()))
        return _literal(stored.literal, stored.shape if not stored.views else (-1,), dtype, like.device)
    tensor = tensors[stored.name].to(dtype)
    return tensor if stored.inverse_sigma is None else inverse_sigma(tensor, stored.inverse_sigma)


def inverse_sigma(variance: Tensor, epsilon: float) -> Tensor:
    """The square root of a variance, rounded as the network's own batch norm does."""
    return torch.rsqrt(variance + epsilon)


def seen_through(stored: Stored, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A view of a tensor, or of a power of it."""
    for operation in stored.views:
        tensor = move_tensor(operation, tensor)
    return 1 / tensor.to(dtype or tensor.dtype) if stored.inverse else tensor


@functools.lru_cache(maxsize=1024)
def _literal(numbers: tuple[float, ...], shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers written in the model's code, copied to the device once."""
    return torch.tensor(numbers, dtype=dtype, device=device).reshape(shape)


@dataclass(frozen=True)
class EdgeTensors:
    """The weights of a graph's edges as tensors. What must be computed (a batch norm's weight / sigma)
    is computed once: both passes and gamma ask for it."""

    tensors: Tensors
    dtype: torch.dtype
    _kept: dict[tuple[int, bool], Tensor | None] = field(default_factory=dict)

    def weights(self, weight: Weight) -> Tensor:
        """The signed weights of an operation's edges: parameter times fixed factors."""
        if weight.parameter is not None and not weight.factors:
            return stored_tensor(weight.parameter, self.tensors, self.dtype)
        key = (id(weight), True)
        if key not in self._kept:
            factor = self.factor(weight)
            assert factor is not None
            if weight.parameter is not None:
                factor = stored_tensor(weight.parameter, self.tensors, self.dtype).to(self.dtype) * factor
            self._kept[key] = factor.expand(weight.shape)
        kept = self._kept[key]
        assert kept is not None
        return kept

    def factor(self, weight: Weight) -> Tensor | None:
        """The product of what multiplies the parameter, or None if nothing does."""
        key = (id(weight), False)
        if key not in self._kept:
            product: Tensor | None = None
            for stored in weight.factors:
                tensor = stored_tensor(stored, self.tensors, self.dtype).to(self.dtype)
                product = tensor if product is None else product * tensor
            self._kept[key] = product
        return self._kept[key]


def to_parameter(
    arithmetic: Arithmetic,
    weight: Weight,
    per_edge: ExtendedFloat,
    factor: ExtendedFloat | None,
    tensors: Tensors,
) -> ExtendedFloat:
    """``dF/d|w|^p`` of the parameter from that of the edges: through factors, broadcasting and views."""
    assert weight.parameter is not None
    if factor is not None:
        per_edge = arithmetic.multiply(per_edge, factor)
    per_edge = reduced_to(arithmetic, per_edge, weight.parameter.shape)
    shapes: list[Shape] = [tuple(tensors[weight.parameter.name].shape)]
    for operation in weight.parameter.views:
        shapes.append(_moved_shape(operation, shapes[-1]))
    for operation, before in zip(reversed(weight.parameter.views), reversed(shapes[:-1]), strict=True):
        match operation:
            case Reshape():
                per_edge = move(Reshape(before), per_edge)
            case Permute(dims):
                inverse = tuple(sorted(range(len(dims)), key=dims.__getitem__))
                per_edge = move(Permute(inverse), per_edge)
            case Slice(dim, start, _, step):
                per_edge = move(Embed(dim, start, before[dim], step), per_edge)
            case Expand(shape):
                per_edge = arithmetic.reduce(per_edge, [d for d, n in enumerate(before) if n != shape[d]])
            case _:
                raise AssertionError(f"{operation} is no view of a parameter")
    return per_edge


def reduced_to(arithmetic: Arithmetic, x: ExtendedFloat, shape: Shape) -> ExtendedFloat:
    """The adjoint of broadcasting ``shape`` to the shape of ``x``."""
    extra = x.mantissa.dim() - len(shape)
    padded = (1,) * extra + tuple(shape)
    dims = [d for d, n in enumerate(padded) if n == 1 and x.mantissa.shape[d] != 1]
    if dims:
        x = arithmetic.reduce(x, dims)
    return move(Reshape(tuple(shape)), x) if extra else x


def _moved_shape(operation: object, shape: Shape) -> Shape:
    probe = torch.empty(shape, device="meta")
    return tuple(move_tensor(operation, probe).shape)  # type: ignore[arg-type]
