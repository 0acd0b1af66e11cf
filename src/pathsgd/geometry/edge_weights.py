"""The weights of a graph's edges as tensors, and their powers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pathsgd._torch import foreach, is_plain
from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat
from pathsgd.graph.channel_norms import ChannelNorm
from pathsgd.graph.nodes import Linear, Shape, Stored, Weight
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.sharded import is_sharded
from pathsgd.graph.views import view_tensor

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
    together, on a GPU in a few launches. Powers of linear layers are computed block by block and never
    stored, see :mod:`pathsgd.geometry.operations.contraction`.
    """

    def __init__(self, graph: PathGraph, tensors: Tensors, arithmetic: Arithmetic) -> None:
        self.tensors, self.arithmetic = tensors, arithmetic
        self._weights = dict(graph.weights())
        self._signed: dict[int, Tensor] = {}
        self._powers: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._shifts: dict[int, Tensor] = {}
        self._powered: frozenset[int] = frozenset()
        if not arithmetic.exponents and not math.isinf(arithmetic.p):
            self._powered = frozenset(
                k for k in self._weights if not isinstance(graph.nodes[k].operation, Linear)
            )
        self._of_powers = replace(arithmetic, as_given=True)

    def signed(self, k: int) -> Tensor:
        """The weights of node k's edges."""
        if k not in self._signed:
            self._signed[k] = signed_weights(self._weights[k], self.tensors, self.arithmetic.dtype)
        return self._signed[k]

    def for_operation(self, k: int) -> tuple[Arithmetic, Tensor | None]:
        """The arithmetic node k is computed in, with its weights or their powers."""
        if k not in self._weights:
            return self.arithmetic, None
        if k not in self._powered:
            return self.arithmetic, self.signed(k)
        powers, _ = self._powers_of(k)
        return self._of_powers, powers.expand(self._weights[k].shape)

    def of_norm(self, norms: Mapping[int, ChannelNorm], k: int) -> tuple[Tensor, Tensor]:
        """Scale and shift of one of these norms, by channel."""
        if not self._shifts:
            powers = [[self._powers_of(j)[0] for j in norm.shifts] for norm in norms.values()]
            self._shifts = dict(zip(norms, add_lists(powers), strict=True))
        return self._powers_of(norms[k].scale)[0], self._shifts[k]

    def factor_power(self, k: int) -> ExtendedFloat | None:
        """``|.|^p`` of what multiplies the parameter of node k's edges, or None if nothing does."""
        weight = self._weights[k]
        if not weight.factors:
            return None
        if k not in self._powered:
            factors = signed_weights(replace(weight, parameter=None), self.tensors, self.arithmetic.dtype)
            return self.arithmetic.edges(factors, weight.shape)
        _, power = self._powers_of(k)
        return None if power is None else ExtendedFloat(power.expand(weight.shape))

    def _powers_of(self, k: int) -> tuple[Tensor, Tensor | None]:
        if not self._powers:
            self._compute_powers(sorted(self._powered))
        return self._powers[k]

    def _compute_powers(self, nodes: list[int]) -> None:
        """``|parameter * factors|^p`` and ``|factors|^p`` of several nodes together. The product is taken
        before the power, as with exponents, so that both are rounded alike."""
        weights = [self._weights[k] for k in nodes]
        bases = self._bases(weights)
        factors: list[Tensor | None] = [None] * len(weights)
        kept = [_drop_signs(weight) for weight in weights]
        for place in range(max(len(own) for own in kept)):
            more = [_from_bases(own[place] if place < len(own) else None, bases) for own in kept]
            factors = multiply_pairs(factors, more)
        edges = multiply_pairs([_from_bases(w.parameter, bases) for w in weights], factors)
        signed = [*edges, *factors]
        powers = iter(_take_powers(self.arithmetic, [tensor for tensor in signed if tensor is not None]))
        powered = [None if tensor is None else next(powers) for tensor in signed]
        for k, edge, factor in zip(nodes, powered[: len(nodes)], powered[len(nodes) :], strict=True):
            assert edge is not None
            self._powers[k] = edge, factor

    def _bases(self, weights: Sequence[Weight]) -> dict[_Base, Tensor]:
        """The tensors that the weights are views of, each once."""
        stored = {_base_key(s): s for w in weights for s in (w.parameter, *w.factors) if s is not None}
        dtype = self.arithmetic.dtype
        bases = {key: _base(replace(s, inverse_sigma=None), self.tensors, dtype) for key, s in stored.items()}
        for epsilon in {s.inverse_sigma for s in stored.values() if s.inverse_sigma is not None}:
            keys = [key for key, s in stored.items() if s.inverse_sigma == epsilon]
            bases.update(zip(keys, _inverse_sigmas([bases[key] for key in keys], epsilon), strict=True))
        return bases


_Base = tuple[str, tuple[float, ...], float | None]


def _base_key(stored: Stored) -> _Base:
    return stored.name, stored.literal, stored.inverse_sigma


def _drop_signs(weight: Weight) -> tuple[Stored, ...]:
    """The factors, without those whose powers are one, if anything is left then."""
    kept = tuple(stored for stored in weight.factors if stored.literal not in ((1.0,), (-1.0,)))
    return kept if kept or weight.parameter is not None else weight.factors


def _from_bases(stored: Stored | None, bases: Mapping[_Base, Tensor]) -> Tensor | None:
    return None if stored is None else _view_stored(stored, bases[_base_key(stored)])


def _base(stored: Stored, tensors: Tensors, dtype: torch.dtype | None) -> Tensor:
    """The tensor that a stored one is a view of."""
    if stored.literal:
        device = next(iter(tensors.values())).device
        shape = (-1,) if stored.views else stored.shape
        return _literal(stored.literal, shape, dtype or torch.get_default_dtype(), device)
    tensor = tensors[stored.name]
    tensor = tensor if dtype is None else tensor.to(dtype)
    return tensor if stored.inverse_sigma is None else _inverse_sigmas([tensor], stored.inverse_sigma)[0]


@functools.lru_cache(maxsize=1024)
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
    return len(tensors) > 1 and all(t.is_cuda and not is_sharded(t) and is_plain(t) for t in tensors)


def _inverse_sigmas(variances: list[Tensor], epsilon: float) -> list[Tensor]:
    """``1 / sqrt(variance + epsilon)``, rounded as the network's own batch norm does."""
    if _worth_batching(variances):
        return list(foreach("rsqrt", foreach("add", variances, epsilon)))
    return [torch.rsqrt(variance + epsilon) for variance in variances]


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
