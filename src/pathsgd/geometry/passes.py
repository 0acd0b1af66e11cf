"""Algorithm 1 on a PathGraph: the forward and the backward pass over the powered network.

In the powered network ``|w|^p`` stands for every weight w, and every input is 1. The value of a unit is then
``gamma_in``, the sum over the paths that arrive at it; ``gamma_out``, the sum over the paths that leave it,
is the gradient of the sum of all outputs. For p = inf read max for sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pathsgd.errors import PathError
from pathsgd.geometry.operations.apply import adjoint, apply
from pathsgd.geometry.scaled import Arithmetic, Scaled
from pathsgd.graph.edge_weights import Tensors, signed_weights
from pathsgd.graph.nodes import Add, Begin, Cat, Conv, Linear, Multiply, Square, Weighted
from pathsgd.graph.structure import Structure
from pathsgd.sharding import local_part

Values = dict[int, Scaled]

TRUSTED = 2.0**500
"""Mantissas, which are centered at 1, between its inverse and it are trusted: so are their products."""


TRUSTED_ROOT = 2.0**100
"""Numbers x without exponents are trusted if ``x^(1/p)`` is between its inverse and it, and x is in the range
of TRUSTED."""

COMPUTED = (Linear, Conv, Multiply, Add, Square, Cat)
"""Operations after which numbers may lie farther apart; others move numbers, or are zero where a bias is."""


@dataclass(frozen=True)
class PoweredNetwork:
    """The powered network of one graph with one set of tensors."""

    graph: Structure
    tensors: Tensors
    arithmetic: Arithmetic
    looks: bool = False
    """Whether the range of all numbers is recorded, for :func:`is_in_range` and :func:`check_range`."""
    seen: list[Tensor] = field(default_factory=list)
    """The least and the largest number of every node that was computed; of centered ones the least positive
    number, the largest, and the number of zeros."""
    _weights: dict[int, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def weight(self, k: int) -> Tensor | None:
        """The weights of node k's edges, computed once."""
        operation = self.graph.nodes[k].operation
        if not isinstance(operation, Weighted):
            return None
        if k not in self._weights:
            self._weights[k] = signed_weights(operation.weight, self.tensors)
        return self._weights[k]

    def factor_power(self, k: int) -> Scaled | None:
        """``|.|^p`` of what multiplies the parameter of node k's edges, or None if nothing does."""
        operation = self.graph.nodes[k].operation
        assert isinstance(operation, Weighted)
        if not operation.weight.factors:
            return None
        factors = signed_weights(replace(operation.weight, parameter=None), self.tensors)
        return self.arithmetic.edges(factors, operation.weight.shape)

    def forward(self, wanted: Iterable[int]) -> Values:
        """``gamma_in`` of the nodes ``wanted``: ``gamma_in(v) = sum_u gamma_in(u) |w_uv|^p``."""
        nodes, wanted = self.graph.nodes, set(wanted)
        asked = set(wanted)
        for k in reversed(range(len(nodes))):
            if k in asked:
                asked.update(nodes[k].inputs)
        last_reader = {source: k for k in sorted(asked) for source in nodes[k].inputs}
        gamma_in: Values = {}
        for k in sorted(asked):
            node = nodes[k]
            inputs = [gamma_in[source] for source in node.inputs]
            gamma_in[k] = apply(
                self.arithmetic, node.operation, inputs, self.weight(k), node.shape, self.device
            )
            self._look(k, gamma_in[k])
            for source in node.inputs:
                if last_reader[source] == k and source not in wanted:
                    gamma_in.pop(source, None)
        return gamma_in

    def backward(self, gamma_in: Values) -> Iterator[tuple[int, Scaled]]:
        """``gamma_out`` of every node that paths leave, from the last to the first:
        ``gamma_out(u) = sum_v |w_uv|^p gamma_out(v)``; ``gamma_in`` holds what :meth:`find_multiplied`
        names."""
        nodes = self.graph.nodes
        arriving: list[list[Scaled]] = [[] for _ in nodes]
        for k in reversed(range(len(nodes))):
            if k in self.graph.ends:
                arriving[k].append(self.arithmetic.ones(nodes[k].shape, self.device))
            if not arriving[k]:
                continue
            gamma_out = self.arithmetic.add(arriving[k])
            arriving[k] = []
            self._look(k, gamma_out)
            yield k, gamma_out
            if all(isinstance(nodes[source].operation, Begin) for source in nodes[k].inputs):
                continue  # nothing needs gamma_out of the inputs
            shapes = [nodes[source].shape for source in nodes[k].inputs]
            squared = gamma_in.get(nodes[k].inputs[0])
            flows = adjoint(self.arithmetic, nodes[k].operation, gamma_out, self.weight(k), shapes, squared)
            for source, flow in zip(nodes[k].inputs, flows, strict=True):
                arriving[source].append(flow)

    def find_multiplied(self) -> set[int]:
        """The nodes whose gamma_in the backward pass and gamma ask for: what is multiplied by a
        parameter."""
        return {
            k
            for node in self.graph.nodes
            if isinstance(node.operation, Square)
            or (isinstance(node.operation, Weighted) and node.operation.weight.parameter is not None)
            for k in node.inputs
        }

    def _look(self, k: int, x: Scaled) -> None:
        if self.looks and isinstance(self.graph.nodes[k].operation, COMPUTED) and x.mantissa.numel():
            m = x.mantissa.detach()
            if not self.arithmetic.centered:
                self.seen.append(torch.stack(m.aminmax()))
                return
            least = torch.where(m > 0, m, torch.inf).amin()
            self.seen.append(torch.stack([least, m.amax(), (m == 0).sum().double()]))


def is_in_range(network: PoweredNetwork) -> bool:
    """Whether fp64 alone was enough for a network that is not centered, nothing is zero, and fp32 holds the
    p-th roots of all numbers, which steps are multiplied by."""
    if not network.seen:
        return True
    least, largest = torch.stack(network.seen).T.tolist()
    bound = 2.0 ** min(math.log2(TRUSTED), math.log2(TRUSTED_ROOT) * network.arithmetic.order)
    return all(x >= 1 / bound for x in least) and all(x <= bound for x in largest)  # nan is not


def check_range(network: PoweredNetwork, wanted: Iterable[int], backward: bool) -> None:
    """Refuses path weights that were lost: those of one layer differ by more than fp64 can hold.

    Args:
        network: after a pass in which it looked.
        wanted: the nodes that the forward pass was asked for.
        backward: whether there was a backward pass.

    Raises:
        PathError: numbers of one layer are too far apart, or a unit that paths reach was computed to be 0.
    """
    if not network.seen:
        return
    least, largest, zeros = torch.stack(network.seen).T.tolist()
    is_lost = any(x < 1 / TRUSTED for x in least) or any(x > TRUSTED for x in largest)
    if not is_lost and any(zeros):
        # With 1 for every weight that is not zero, path weights count paths.
        ones = {n: (t != 0).double() if t.is_floating_point() else t for n, t in network.tensors.items()}
        counted = PoweredNetwork(network.graph, ones, Arithmetic(1.0), looks=True)
        values = counted.forward(wanted)
        if backward:
            for _ in counted.backward(values):
                pass
        is_lost = [float(row[2]) for row in counted.seen] != zeros
    # Weights that have diverged give norms that are not finite, which is what a user looks for.
    if is_lost and all(bool(torch.isfinite(local_part(t)).all()) for t in network.tensors.values()):
        raise PathError(
            f"the path weights of one layer of {network.graph.model} at p = {network.arithmetic.p:g} differ "
            "by more than fp64 can hold; call pathsgd.balance(model) first, which leaves the function as it "
            "is, or take a smaller p or p = math.inf"
        )
