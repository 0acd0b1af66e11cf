"""Algorithm 1 on a PathGraph: path weight forward from the inputs and backward from the outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.geometry.edge_weights import EdgeTensors, Tensors
from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat
from pathsgd.geometry.operations.apply import adjoint, apply
from pathsgd.geometry.powers import EdgePowers, Powered
from pathsgd.graph.nodes import Begin, Conv, Linear, Scale, Source, Square, Weight, Weighted
from pathsgd.graph.path_graph import PathGraph, compute_dtype

Values = dict[int, ExtendedFloat]
POWERED = (Conv, Scale, Source)


@dataclass(frozen=True)
class PoweredNetwork:
    """The powered network of one graph with one set of tensors."""

    graph: PathGraph
    edges: EdgeTensors
    arithmetic: Arithmetic
    powers: EdgePowers | None = None
    """In plain floats: of all edges but those of linear layers."""

    def weight(self, k: int) -> Tensor | None:
        """The signed edge weights of node k, if it has any."""
        operation = self.graph.nodes[k].operation
        if isinstance(operation, Weighted):
            return self.edges.weights(operation.weight)
        return None

    def _edges(self, k: int) -> tuple[Arithmetic, Tensor | None]:
        """What node k is computed in, with its weights or their powers."""
        operation = self.graph.nodes[k].operation
        if self.powers is not None and isinstance(operation, POWERED):
            return Powered(self.arithmetic.p, self.arithmetic.dtype), self.powers.edges(operation.weight)
        return self.arithmetic, self.weight(k)

    def source(self, k: int) -> Tensor:
        """``|w|^p`` of the edges from the constant unit to node k, in plain floats."""
        arithmetic, weight = self._edges(k)
        assert weight is not None
        return arithmetic.power(weight.to(arithmetic.dtype))

    def factor(self, weight: Weight) -> ExtendedFloat | None:
        """``|.|^p`` of what multiplies the parameter of some edges, or None if nothing does."""
        if not weight.factors:
            return None
        if self.powers is not None:
            factor = self.powers.factor(weight)
            assert factor is not None
            return ExtendedFloat(factor.expand(weight.shape))
        factor = self.edges.factor(weight)
        assert factor is not None
        return self.arithmetic.edges(factor, weight.shape)

    @property
    def device(self) -> torch.device:
        return next(iter(self.edges.tensors.values())).device

    def forward(self) -> Iterator[tuple[int, ExtendedFloat]]:
        """``gamma_in`` of every node in order: the sum over paths that arrive there."""
        nodes = self.graph.nodes
        last_reader = {source: k for k, node in enumerate(nodes) for source in node.inputs}
        values: dict[int, ExtendedFloat] = {}
        for k, node in enumerate(nodes):
            inputs = [values[source] for source in node.inputs]
            arithmetic, weight = self._edges(k)
            values[k] = apply(arithmetic, node.operation, inputs, weight, node.shape, self.device)
            yield k, values[k]
            for source in node.inputs:
                if last_reader[source] == k:
                    values.pop(source, None)

    def backward(self, values: Values) -> Iterator[tuple[int, ExtendedFloat]]:
        """``gamma_out`` of every node that paths leave, from the last to the first: the sum over them.

        ``values`` are those of the forward pass at :meth:`needed`; they are dropped when used up.
        """
        nodes = self.graph.nodes
        flows: list[list[ExtendedFloat]] = [[] for _ in nodes]
        for k in reversed(range(len(nodes))):
            values.pop(k, None)
            if k in self.graph.ends:
                flows[k].append(self.arithmetic.ones(nodes[k].shape, self.device))
            if not flows[k]:
                continue
            gradient = self.arithmetic.add(flows[k])
            flows[k] = []
            yield k, gradient
            # What flows into a place where paths begin is asked for by nobody.
            if all(isinstance(nodes[source].operation, Begin) for source in nodes[k].inputs):
                continue
            back = self.adjoint(k, gradient, values)
            for source, flow in zip(nodes[k].inputs, back, strict=True):
                flows[source].append(flow)

    def adjoint(self, k: int, gradient: ExtendedFloat, values: Values) -> list[ExtendedFloat]:
        """What flows back from node k to each of its inputs."""
        node = self.graph.nodes[k]
        shapes = [self.graph.nodes[source].shape for source in node.inputs]
        squared = values[node.inputs[0]] if isinstance(node.operation, Square) else None
        arithmetic, weight = self._edges(k)
        return adjoint(arithmetic, node.operation, gradient, weight, shapes, squared)

    def needed(self) -> set[int]:
        """The nodes whose forward value the backward pass asks for: what is multiplied by a weight."""
        needed: set[int] = set()
        for node in self.graph.nodes:
            if isinstance(node.operation, (Linear, Conv, Scale, Square)):
                needed.update(node.inputs)
        return needed


def powered_network(graph: PathGraph, tensors: Tensors, p: float, exponents: bool = False) -> PoweredNetwork:
    # A high power of a mantissa needs a wider exponent than fp32 has.
    dtype = torch.float64 if 32 < p < math.inf else compute_dtype(tensors)
    arithmetic = Arithmetic(float(p), dtype, exponents)
    powers = None
    if not exponents and p < math.inf:
        powers = EdgePowers(tensors, arithmetic)
        if next(iter(tensors.values())).is_cuda:
            powers.prepare([n.operation.weight for n in graph.nodes if isinstance(n.operation, POWERED)])
    return PoweredNetwork(graph, EdgeTensors(tensors, dtype), arithmetic, powers)
