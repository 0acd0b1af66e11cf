"""Algorithm 1 on a PathGraph: path weight forward from the inputs and backward from the outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pathsgd.geometry.apply import adjoint, apply
from pathsgd.geometry.scaled import Arithmetic, Scaled
from pathsgd.geometry.weights import Tensors, edge_weights
from pathsgd.graph.nodes import Add, AxisMap, Begin, Conv, Linear, Reduce, Scale, Source, Square
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

    def backward(self, values: list[Scaled]) -> list[Scaled | None]:
        """``gamma_out`` of every node: the sum over paths that leave it; None if there is none."""
        nodes = self.graph.nodes
        flows: list[list[Scaled]] = [[] for _ in nodes]
        total: list[Scaled | None] = [None] * len(nodes)
        for k in reversed(range(len(nodes))):
            if k in self.graph.ends:
                flows[k].append(self.arithmetic.ones(nodes[k].shape, self.device))
            if not flows[k]:
                continue
            gradient = self.arithmetic.add(flows[k])
            total[k] = gradient
            flows[k] = []
            # What flows into a place where paths begin is asked for by nobody.
            if all(isinstance(nodes[source].operation, Begin) for source in nodes[k].inputs):
                continue
            inputs = [values[source] for source in nodes[k].inputs]
            back = adjoint(self.arithmetic, nodes[k].operation, gradient, self.weight(k), inputs)
            for source, flow in zip(nodes[k].inputs, back, strict=True):
                flows[source].append(flow)
        return total


PRODUCTS = (Source, Scale, Square)
SUMS = (Linear, Conv, Add, AxisMap, Reduce)


def safe_range(dtype: torch.dtype) -> tuple[float, float, float]:
    """(smallest product, smallest sum, largest number) that plain floats are trusted with.

    A term of a sum is known to within the smallest subnormal times the largest number; a sum over
    these bounds is so much larger that nothing is lost. A product only has to be a normal number.
    """
    if dtype == torch.float64:
        return 2.0**-1000, 2.0**-600, 2.0**400
    return 2.0**-120, 2.0**-60, 2.0**40


def in_range(flow: Flow, values: list[Scaled], gradients: list[Scaled | None] | None = None) -> bool:
    """Whether plain floats were enough. One look at the device for the whole network."""
    gradients = [None] * len(values) if gradients is None else gradients
    product, total, high = safe_range(flow.arithmetic.dtype)
    looked: list[tuple[int, Tensor, float, bool]] = []
    for k, (node, value, gradient) in enumerate(zip(flow.graph.nodes, values, gradients, strict=True)):
        if isinstance(node.operation, (*PRODUCTS, *SUMS)) and value.mantissa.numel():
            low = product if isinstance(node.operation, PRODUCTS) else total
            looked.append((k, value.mantissa, low, True))
            if gradient is not None:
                looked.append((k, gradient.mantissa, total, False))
    if not looked:
        return True
    extremes = torch.stack([torch.stack(torch.aminmax(m)) for _, m, _, _ in looked]).tolist()
    if not all(largest <= high for _, largest in extremes):
        return False
    for (k, m, low, forward), (least, _) in zip(looked, extremes, strict=True):
        if least >= low:
            continue
        if bool(((m > 0) & (m < low)).any()):
            return False
        # What is left are zeros: dead units, unless a path weight underflowed.
        if _lost_forward(flow, values, k) if forward else _lost_backward(flow, values, gradients, k):
            return False
    return True


def _lost_forward(flow: Flow, values: list[Scaled], k: int) -> bool:
    """Whether a unit of node k that paths reach was computed to be zero."""
    node = flow.graph.nodes[k]
    plain = Arithmetic(1.0, flow.arithmetic.dtype)
    weight = flow.weight(k)
    alive = [_indicator(values[source].mantissa, plain) for source in node.inputs]
    nonzero = None if weight is None else (weight != 0).to(plain.dtype)
    reached = apply(plain, node.operation, alive, nonzero, node.shape, flow.device)
    return bool(((reached.mantissa > 0) & (values[k].mantissa == 0)).any())


def _lost_backward(flow: Flow, values: list[Scaled], gradients: list[Scaled | None], k: int) -> bool:
    """The same question for what flows back into node k from its readers."""
    plain = Arithmetic(1.0, flow.arithmetic.dtype)
    own = gradients[k]
    assert own is not None
    for reader, node in enumerate(flow.graph.nodes):
        gradient = gradients[reader]
        if k not in node.inputs or gradient is None:
            continue
        weight = flow.weight(reader)
        nonzero = None if weight is None else (weight != 0).to(plain.dtype)
        inputs = [values[source] for source in node.inputs]
        alive = _indicator(gradient.mantissa, plain)
        back = adjoint(plain, node.operation, alive, nonzero, inputs)
        for source, flowed in zip(node.inputs, back, strict=True):
            if source == k and bool(((flowed.mantissa > 0) & (own.mantissa == 0)).any()):
                return True
    return False


def _indicator(x: Tensor, arithmetic: Arithmetic) -> Scaled:
    return Scaled((x > 0).to(arithmetic.dtype))


def flow_of(graph: PathGraph, tensors: Tensors, p: float, exponents: bool = False) -> Flow:
    return Flow(graph, tensors, Arithmetic(float(p), compute_dtype(tensors), exponents))
