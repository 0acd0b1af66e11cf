"""The weights of a graph's edges as tensors, and their powers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pathsgd._torch import are_plain, foreach
from pathsgd.geometry.devices import has_tensor_cores
from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat
from pathsgd.graph.channel_norms import ChannelNorm
from pathsgd.graph.nodes import Shape, Stored, Weight
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.sharded import any_sharded
from pathsgd.graph.views import view_tensor
from pathsgd.graph.weight_plan import Column, Vectors, keep_factors, stored_in

Tensors = Mapping[str, Tensor]


def signed_weights(weight: Weight, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    """Parameter times fixed factors. A parameter alone keeps its own dtype: blocks of it are converted
    later."""
    if weight.parameter is not None and not weight.factors:
        return _view_stored(weight.parameter, _base(weight.parameter, tensors, None), dtype)
    product: Tensor | None = None
    for stored in weight.factors:
        product = _times(product, _view_stored(stored, _base(stored, tensors, dtype)))
    if weight.parameter is not None:
        product = _times(_view_stored(weight.parameter, _base(weight.parameter, tensors, dtype)), product)
    assert product is not None
    return product.expand(weight.shape)


class EdgeWeights:
    """The edge weights of a graph by node. Both passes and gamma ask for them, so each is computed once.

    In plain floats ``|w|^p`` of convolutions, biases and norms is kept, too; all of them are computed
    together, in a few calls. Not so those of linear layers, which are computed block by block, see
    :mod:`pathsgd.geometry.operations.contraction`, and of convolutions that GPU kernels square.
    """

    def __init__(self, graph: PathGraph, tensors: Tensors, arithmetic: Arithmetic) -> None:
        self.tensors, self.arithmetic = tensors, arithmetic
        self._plan = graph.weight_plan
        self._signed: dict[int, Tensor] = {}
        self._powers: dict[int, Tensor] = {}
        self._factor_powers: dict[int, Tensor] = {}
        self._columns: dict[Column, Tensor] = {}
        self._of_norms: dict[int, tuple[Tensor, Tensor]] = {}
        self._powered: frozenset[int] = frozenset()
        if not arithmetic.exponents and not math.isinf(arithmetic.p):
            self._powered = self._plan.powered
            if _squares_convolutions(arithmetic, tensors):
                self._powered -= self._plan.convolutions
        self._of_powers = replace(arithmetic, as_given=True)

    def signed(self, k: int) -> Tensor:
        """The weights of node k's edges."""
        if k not in self._signed:
            self._signed[k] = signed_weights(self._plan.weights[k], self.tensors, self.arithmetic.dtype)
        return self._signed[k]

    def for_operation(self, k: int) -> tuple[Arithmetic, Tensor | None]:
        """The arithmetic node k is computed in, with its weights or their powers."""
        weight = self._plan.weights.get(k)
        if weight is None:
            return self.arithmetic, None
        if k not in self._powered:
            return self.arithmetic, self.signed(k)
        powers = self._powers_of(k)
        return self._of_powers, powers if powers.shape == weight.shape else powers.expand(weight.shape)

    def of_norm(self, norms: Mapping[int, ChannelNorm], k: int) -> tuple[Tensor, Tensor]:
        """Scale and shift of one of these norms, by channel."""
        if not self._of_norms:
            scales = [self._powers_of(norm.scale) for norm in norms.values()]
            shifts = self._add_nodes([norm.shifts for norm in norms.values()])
            self._of_norms = dict(zip(norms, zip(scales, shifts, strict=True), strict=True))
        return self._of_norms[k]

    def factor_power(self, k: int) -> ExtendedFloat | None:
        """``|.|^p`` of what multiplies the parameter of node k's edges, or None if nothing does."""
        weight = self._plan.weights[k]
        if not weight.factors:
            return None
        if k not in self._powered:
            factors = signed_weights(replace(weight, parameter=None), self.tensors, self.arithmetic.dtype)
            return self.arithmetic.edges(factors, weight.shape)
        kept = keep_factors(weight)
        if not kept:
            return None
        if k not in self._factor_powers:
            vectors = self._plan.vectors_of.get(k)
            if vectors is None:
                self._factor_powers[k] = self.arithmetic.power(self._multiply(kept))
            else:
                self._factor_powers.update(_split(vectors, self._power_columns(vectors.factors)))
        return ExtendedFloat(self._factor_powers[k].expand(weight.shape))

    def _powers_of(self, k: int) -> Tensor:
        """``|parameter * factors|^p`` of node k, and of others together with it. The product is taken before
        the power, as with exponents, so that both are rounded alike."""
        if k not in self._powers:
            vectors = self._plan.vectors_of.get(k)
            if vectors is None:
                others = [k for k in self._plan.others if k in self._powered]
                products = [self._multiply(stored_in(self._plan.weights[j])) for j in others]
                self._powers.update(zip(others, _take_powers(self.arithmetic, products), strict=True))
            else:
                self._powers.update(_split(vectors, self._power_columns(vectors.columns)))
        return self._powers[k]

    def _add_nodes(self, lists: Sequence[tuple[int, ...]]) -> Iterable[Tensor]:
        """The sum of the powers of each list of nodes."""
        places = [self._plan.vectors.get(nodes) for nodes in itertools.zip_longest(*lists)]
        vectors = [place for place in places if place is not None]
        if len(vectors) < len(places):
            return add_lists([[self._powers_of(k) for k in own] for own in lists])
        powers = [self._power_columns(each.columns) for each in vectors]
        return (total for _, total in _split(vectors[0], functools.reduce(torch.add, powers)))

    def _multiply(self, stored: Iterable[Stored]) -> Tensor:
        dtype = self.arithmetic.dtype
        return functools.reduce(torch.mul, (_view_stored(s, _base(s, self.tensors, dtype)) for s in stored))

    def _power_columns(self, columns: Iterable[Column]) -> Tensor:
        """``|.|^p`` of a product, of all that is laid one after the other."""
        return self.arithmetic.power(functools.reduce(torch.mul, map(self._lay_out, columns)))

    def _lay_out(self, column: Column) -> Tensor:
        """The tensors of a column, one after the other."""
        if column not in self._columns:
            parts = [self.tensors[name] for name in column.names]
            if any(part.dtype != self.arithmetic.dtype or part.dim() != 1 for part in parts):
                parts = [self.arithmetic.cast(part).flatten() for part in parts]
            joined = torch.cat(parts)
            epsilon = column.inverse_sigma
            self._columns[column] = joined if epsilon is None else _inverse_sigma(joined, epsilon)
        return self._columns[column]


def _squares_convolutions(arithmetic: Arithmetic, tensors: Tensors) -> bool:
    """Whether kernels square the weights of convolutions as they read them."""
    if arithmetic.p != 2 or arithmetic.dtype != torch.float32 or not are_plain(list(tensors.values())):
        return False
    return has_tensor_cores(next(iter(tensors.values())).device)


def _split(vectors: Vectors, joined: Tensor) -> Iterator[tuple[int, Tensor]]:
    """What was laid one after the other, by node."""
    return zip(vectors.nodes, joined.reshape(vectors.shape).split_with_sizes(vectors.sizes), strict=True)


def _base(stored: Stored, tensors: Tensors, dtype: torch.dtype | None) -> Tensor:
    """The tensor that a stored one is a view of."""
    if stored.literal:
        device = next(iter(tensors.values())).device
        shape = (-1,) if stored.views else stored.shape
        return _literal(stored.literal, shape, dtype or torch.get_default_dtype(), device)
    tensor = tensors[stored.name]
    tensor = tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)
    return tensor if stored.inverse_sigma is None else _inverse_sigma(tensor, stored.inverse_sigma)


def _inverse_sigma(variance: Tensor, epsilon: float) -> Tensor:
    """``1 / sqrt(variance + epsilon)``, rounded twice: CUDA's ``rsqrt`` is too small by a bit where the
    variance is 1, in all norms of a new network."""
    return torch.sqrt(variance + epsilon).reciprocal()


@functools.cache
def _literal(numbers: tuple[float, ...], shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers written in the model's code, copied to the device once."""
    return torch.tensor(numbers, dtype=dtype, device=device).reshape(shape)


def _view_stored(stored: Stored, base: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    for view in stored.views:
        base = view_tensor(view, base)
    return 1 / base.to(dtype or base.dtype) if stored.inverse else base


# Many small tensors at once


def _worth_batching(tensors: Sequence[Tensor]) -> bool:
    """Whether a few launches for all tensors are worth more than the simplicity of one for each."""
    on_gpu = len(tensors) > 1 and all(tensor.is_cuda for tensor in tensors)
    return on_gpu and are_plain(tensors) and not any_sharded(tensors)


def _take_powers(arithmetic: Arithmetic, tensors: list[Tensor]) -> list[Tensor]:
    if arithmetic.p == 2 and _worth_batching(tensors):
        return list(foreach("mul", tensors, tensors))
    return [arithmetic.power(tensor) for tensor in tensors]


def add_lists(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum of each list of tensors alike."""
    totals = [own[0] for own in lists]
    for place in range(1, max(len(own) for own in lists)):
        longer = [k for k, own in enumerate(lists) if place < len(own)]
        more = [lists[k][place] for k in longer]
        if _worth_batching(more):
            sums = foreach("add", [totals[k] for k in longer], more)
        else:
            sums = [totals[k] + own for k, own in zip(longer, more, strict=True)]
        for k, total in zip(longer, sums, strict=True):
            totals[k] = total
    return totals


def _times(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """``x y``, None standing for one."""
    return y if x is None else x if y is None else x * y


def multiply_pairs(xs: Sequence[Tensor | None], ys: Sequence[Tensor | None]) -> list[Tensor | None]:
    """``x y`` of each pair, None standing for one."""
    pairs = {
        k: (x, y) for k, (x, y) in enumerate(zip(xs, ys, strict=True)) if x is not None and y is not None
    }
    alike = [k for k, (x, y) in pairs.items() if x.shape == y.shape]
    batched: dict[int, Tensor] = {}
    if _worth_batching([tensor for k in alike for tensor in pairs[k]]):
        products = foreach("mul", [pairs[k][0] for k in alike], [pairs[k][1] for k in alike])
        batched = dict(zip(alike, products, strict=True))
    return [batched[k] if k in batched else _times(x, y) for k, (x, y) in enumerate(zip(xs, ys, strict=True))]
