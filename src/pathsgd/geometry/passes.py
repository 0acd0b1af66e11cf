"""Algorithm 1 on a PathGraph: the forward and the backward pass over the powered network.

In the powered network ``|w|^p`` stands for every weight w, and every input is 1. The value of a unit is then
``gamma_in``, the sum over the paths that arrive at it; ``gamma_out``, the sum over the paths that leave it,
is the gradient of the sum of all outputs. For p = inf read max for sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from pathsgd._torch import is_compiling, is_transforming
from pathsgd.geometry.devices import has_triton
from pathsgd.geometry.edge_weights import EdgeWeights, Tensors
from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat
from pathsgd.geometry.operations.apply import adjoint, apply
from pathsgd.geometry.operations.channel_norm import adjoin_norm
from pathsgd.graph.channel_norms import ChannelNorm
from pathsgd.graph.folding import Folded
from pathsgd.graph.nodes import Begin, Square, Weighted
from pathsgd.graph.path_graph import PathGraph, compute_dtype
from pathsgd.graph.sharded import any_sharded

Values = dict[int, ExtendedFloat]


@dataclass(frozen=True)
class PoweredNetwork:
    """The powered network of one graph with one set of tensors."""

    traced: PathGraph
    folded: Folded
    edges: EdgeWeights
    norms: Mapping[int, ChannelNorm] = field(default_factory=dict)
    """Batch norms that are computed as one, by the node of their outputs: the nodes inside have no values."""

    def join_norms(self) -> PoweredNetwork:
        """The same with batch norms as one, where that is faster: on a GPU, in plain floats."""
        plain = not self.arithmetic.exponents and not math.isinf(self.arithmetic.p)
        if not plain or not _gains_by_joining(self.device):
            return self
        if is_compiling() or is_transforming():  # torch cannot look into a batch norm then
            return self
        if any_sharded(self.edges.tensors.values()):
            return self
        return replace(self, norms=self.graph.channel_norms)

    @property
    def inside_norms(self) -> frozenset[int]:
        """The scales and shifts of :attr:`norms`."""
        return frozenset(k for norm in self.norms.values() for k in (norm.scale, *norm.shifts))

    @property
    def graph(self) -> PathGraph:
        """What the passes run over."""
        return self.folded.graph

    @property
    def arithmetic(self) -> Arithmetic:
        return self.edges.arithmetic

    @property
    def device(self) -> torch.device:
        return next(iter(self.edges.tensors.values())).device

    def forward(self, wanted: Iterable[int]) -> Iterator[tuple[int, ExtendedFloat]]:
        """``gamma_in`` in order of evaluation, of the nodes ``wanted`` and of all before them:
        ``gamma_in(v) = sum_u gamma_in(u) |w_uv|^p``."""
        gamma_in: Values = {}
        edges, norms, device = self.edges, self.norms, self.device
        for k, node, sources, used_up in self.graph.steps(frozenset(wanted), bool(self.norms)):
            inputs = [gamma_in[source] for source in sources]
            if k in norms:
                scale, shift = edges.of_norm(norms, k)
                value = ExtendedFloat(torch.addcmul(shift, inputs[0].mantissa, scale))
            else:
                arithmetic, weight = edges.for_operation(k)
                value = apply(arithmetic, node.operation, inputs, weight, node.shape, device)
            gamma_in[k] = value
            yield k, value
            for source in used_up:
                del gamma_in[source]

    def backward(self, gamma_in: Values) -> Iterator[tuple[int, ExtendedFloat]]:
        """``gamma_out`` of every node that paths leave, from the last to the first:
        ``gamma_out(u) = sum_v |w_uv|^p gamma_out(v)``.

        ``gamma_in`` holds what :meth:`needed_by_backward` names; entries are dropped when used up. Of what is
        inside of :attr:`norms` come the sums over places, by channel: of ``gamma_out`` for a shift, and of
        ``gamma_in gamma_out`` for a scale.
        """
        nodes = self.graph.nodes
        arriving: list[list[ExtendedFloat]] = [[] for _ in nodes]
        for k in reversed(range(len(nodes))):
            gamma_in.pop(k, None)
            if k in self.graph.ends:
                arriving[k].append(self.arithmetic.ones(nodes[k].shape, self.device))
            if not arriving[k]:
                continue
            gamma_out = self.arithmetic.add(arriving[k])
            arriving[k] = []
            yield k, gamma_out
            if k in self.norms:
                norm, x = self.norms[k], gamma_in[self.norms[k].source].mantissa
                scale, _ = self.edges.of_norm(self.norms, k)
                back = adjoin_norm(gamma_out.mantissa, x, scale)
                for shift in norm.shifts:
                    yield shift, ExtendedFloat(back.shift)
                yield norm.scale, ExtendedFloat(back.scale)
                arriving[norm.source].append(ExtendedFloat(back.x))
                continue
            if all(isinstance(nodes[source].operation, Begin) for source in nodes[k].inputs):
                continue  # nothing needs gamma_out of the inputs
            shapes = [nodes[source].shape for source in nodes[k].inputs]
            squared = gamma_in.get(nodes[k].inputs[0])
            arithmetic, weight = self.edges.for_operation(k)
            flows = adjoint(arithmetic, nodes[k].operation, gamma_out, weight, shapes, squared)
            for source, flow in zip(nodes[k].inputs, flows, strict=True):
                arriving[source].append(flow)

    def needed_by_backward(self) -> set[int]:
        """The nodes whose gamma_in the backward pass and gamma ask for: what is multiplied by a parameter.
        What arrives at the outputs is not among them."""
        return {
            k
            for node in self.graph.nodes
            if isinstance(node.operation, Square)
            or (isinstance(node.operation, Weighted) and node.operation.weight.parameter is not None)
            for k in node.inputs
        }


def _gains_by_joining(device: torch.device) -> bool:
    # On a CPU a batch norm rounds as with exponents instead: any two rescaled copies agree in all bits.
    return device.type == "cuda" and has_triton()


def powered_network(
    graph: PathGraph, tensors: Tensors, p: float, exponents: bool = False, folded: bool = True
) -> PoweredNetwork:
    """The powered network of a model's tensors, in plain floats or with an exponent per unit. Not ``folded``,
    every place is computed by itself."""
    # A high power of a mantissa needs a wider exponent than fp32 has.
    dtype = torch.float64 if 32 < p < math.inf else compute_dtype(tensors)
    nodes = graph.folded if folded else Folded.nothing(graph)
    edges = EdgeWeights(nodes.graph, tensors, Arithmetic(float(p), dtype, exponents))
    return PoweredNetwork(graph, nodes, edges)
