"""``|w|^p`` of the edges of convolutions, biases and norms, each computed once for both passes and gamma.

A batch norm is a handful of small vectors: on a GPU those of all norms are computed in a few launches. Linear
layers are not here: their powers are computed block by block and never stored, see contraction.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pathsgd.geometry.edge_weights import Tensors, base_tensor, inverse_sigma, seen_through
from pathsgd.geometry.extended_float import Arithmetic
from pathsgd.graph.nodes import Stored, Weight

Key = tuple[str, tuple[float, ...], float | None]


class Powered(Arithmetic):
    """The arithmetic of a network whose edges come as powers already."""

    def power(self, w: Tensor) -> Tensor:
        return w


class EdgePowers:
    """``|parameter * factors|^p`` in plain floats, rounded as with exponents: the product first."""

    def __init__(self, tensors: Tensors, arithmetic: Arithmetic) -> None:
        self.tensors, self.arithmetic = tensors, arithmetic
        self._factors: dict[int, Tensor | None] = {}
        self._edges: dict[int, Tensor] = {}

    def edges(self, weight: Weight) -> Tensor:
        """In the shape of the weight."""
        if id(weight) not in self._edges:
            self.prepare([weight])
        return self._edges[id(weight)].expand(weight.shape)

    def factor(self, weight: Weight) -> Tensor | None:
        """Of what multiplies the parameter alone, or None if nothing does."""
        if id(weight) not in self._edges:
            self.prepare([weight])
        return self._factors[id(weight)]

    def prepare(self, weights: Sequence[Weight]) -> None:
        """Computes these together."""
        bases = self._bases(stored for weight in weights for stored in _stored(weight))
        factors: list[Tensor | None] = [None] * len(weights)
        for place in range(max([0, *(len(weight.factors) for weight in weights)])):
            more = [
                _seen(weight.factors[place], bases) if place < len(weight.factors) else None
                for weight in weights
            ]
            factors = _products(factors, more)
        parameters = [None if w.parameter is None else _seen(w.parameter, bases) for w in weights]
        signed = [*_products(parameters, factors), *factors]
        powers = iter(_powers(self.arithmetic, [tensor for tensor in signed if tensor is not None]))
        powered = [None if tensor is None else next(powers) for tensor in signed]
        count = len(weights)
        for weight, edges, factor in zip(weights, powered[:count], powered[count:], strict=True):
            assert edges is not None
            self._edges[id(weight)], self._factors[id(weight)] = edges, factor

    def _bases(self, wanted: Iterable[Stored]) -> dict[Key, Tensor]:
        """The tensors these are views of, each once."""
        kinds = {_key(stored): stored for stored in wanted}
        plain = [replace(stored, inverse_sigma=None) for stored in kinds.values()]
        bases = [base_tensor(stored, self.tensors, self.arithmetic.dtype) for stored in plain]
        epsilons = [stored.inverse_sigma for stored in kinds.values()]
        for epsilon in {e for e in epsilons if e is not None}:
            places = [k for k, e in enumerate(epsilons) if e == epsilon]
            for k, inverse in zip(places, _inverse_sigmas([bases[k] for k in places], epsilon), strict=True):
                bases[k] = inverse
        return dict(zip(kinds, bases, strict=True))


def _stored(weight: Weight) -> Iterable[Stored]:
    return weight.factors if weight.parameter is None else (weight.parameter, *weight.factors)


def _key(stored: Stored) -> Key:
    return stored.name, stored.literal, stored.inverse_sigma


def _seen(stored: Stored, bases: dict[Key, Tensor]) -> Tensor:
    return seen_through(stored, bases[_key(stored)])


def _together(tensors: Sequence[Tensor]) -> bool:
    """Whether a few launches for all tensors are worth more than the simplicity of one for each."""
    return (
        len(tensors) > 1
        and all(t.is_cuda for t in tensors)
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )


def _inverse_sigmas(variances: list[Tensor], epsilon: float) -> list[Tensor]:
    if _together(variances):
        return list(torch._foreach_rsqrt(torch._foreach_add(variances, epsilon)))
    return [inverse_sigma(variance, epsilon) for variance in variances]


def _powers(arithmetic: Arithmetic, tensors: list[Tensor]) -> list[Tensor]:
    if arithmetic.p == 2 and _together(tensors):
        return list(torch._foreach_mul(tensors, tensors))
    return [arithmetic.power(tensor) for tensor in tensors]


def _products(xs: Sequence[Tensor | None], ys: Sequence[Tensor | None]) -> list[Tensor | None]:
    """``x y`` of each pair, None standing for one."""
    found = [y if x is None else x for x, y in zip(xs, ys, strict=True)]
    pairs = [
        (k, x, y) for k, (x, y) in enumerate(zip(xs, ys, strict=True)) if x is not None and y is not None
    ]
    alike = [(k, x, y) for k, x, y in pairs if x.shape == y.shape]
    if _together([t for _, x, y in alike for t in (x, y)]):
        products = torch._foreach_mul([x for _, x, _ in alike], [y for *_, y in alike])
        for (k, *_), product in zip(alike, products, strict=True):
            found[k] = product
        pairs = [pair for pair in pairs if pair[1].shape != pair[2].shape]
    for k, x, y in pairs:
        found[k] = x * y
    return found
