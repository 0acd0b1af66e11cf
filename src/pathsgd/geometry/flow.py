"""Algorithm 1 on a PathGraph: path weight forward from the inputs and backward from the outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.geometry.apply import adjoint, apply
from pathsgd.geometry.scaled import Arithmetic, Scaled
from pathsgd.geometry.weights import Tensors, edge_weights
from pathsgd.graph.nodes import Begin, Conv, Linear, Scale, Source
from pathsgd.graph.path_graph import PathGraph, compute_dtype


@dataclass(frozen=True)
class Flow:
    """The powered network of one graph with one set of tensors."""

    graph: PathGraph
    tensors: Tensors
    arithmetic: Arithmetic

    def weight(self, k: int) -> Tensor | None:
        """The signed edge weights of node k, if it has any."""
        operation = self.graph.nodes[k].operation
        if isinstance(operation, (Source, Linear, Conv, Scale)):
            return edge_weights(operation.weight, self.tensors, self.arithmetic.dtype)
        return None

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def forward(self) -> list[Scaled]:
        """``gamma_in`` of every node: the sum over paths that arrive there."""
        values: list[Scaled] = []
        for k, node in enumerate(self.graph.nodes):
            inputs = [values[source] for source in node.inputs]
            values.append(
                apply(self.arithmetic, node.operation, inputs, self.weight(k), node.shape, self.device)
            )
        return values

    def backward(self, values: list[Scaled]) -> Iterator[tuple[int, Scaled]]:
        """``gamma_out`` of every node that paths leave, from the last to the first: the sum over them.

        Only what is still needed is kept in memory.
        """
        nodes = self.graph.nodes
        flows: list[list[Scaled]] = [[] for _ in nodes]
        for k in reversed(range(len(nodes))):
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
            inputs = [values[source] for source in nodes[k].inputs]
            back = adjoint(self.arithmetic, nodes[k].operation, gradient, self.weight(k), inputs)
            for source, flow in zip(nodes[k].inputs, back, strict=True):
                flows[source].append(flow)


def flow_of(graph: PathGraph, tensors: Tensors, p: float, exponents: bool = False) -> Flow:
    return Flow(graph, tensors, Arithmetic(float(p), compute_dtype(tensors), exponents))
