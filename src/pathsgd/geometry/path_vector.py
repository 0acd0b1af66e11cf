"""pi(w): the product of weights along every path of a small network, signs included."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pathsgd.dag import Dag
from pathsgd.errors import PathError
from pathsgd.geometry.operations.apply import apply
from pathsgd.geometry.passes import PoweredNetwork
from pathsgd.geometry.scaled import Arithmetic, Scaled
from pathsgd.graph.nodes import Add, Begin, Cat, Node, Operation, Shape, Source, Square, View
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example, trace
from pathsgd.graph.views import view_tensor


def path_vector(
    model: nn.Module, example_input: Example | PathGraph | None = None, *, max_paths: int = 100_000
) -> dict[tuple[str, ...], float]:
    """pi(w), the product of weights along every path, signs included. Its l_p norm is
    :func:`pathsgd.path_norm`.

    There are exponentially many paths: for small networks.

    Args:
        model: the module to list the paths of.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        max_paths: more paths than this are refused.

    Returns:
        ``{units on the path: product of its weights}`` for every path from an input (or the constant unit
        ``one``) to an output. Units are named by module and place (the batch is the first, 0); ``+`` is the
        sum of a layer and its bias, ``#2`` a second value of the same module.

    Raises:
        TraceError: the model cannot be traced.
        PathError: there are too many paths, or the network squares its activations.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
        >>> model[0].weight.data = torch.tensor([[2.0], [-3.0]])
        >>> model[2].weight.data = torch.tensor([[5.0, 1.0]])
        >>> for path, product in sorted(path_vector(model).items()):
        ...     print(*path, product)
        input[0,0] 0[0,0] 2[0,0] 10.0
        input[0,0] 0[0,1] 2[0,0] -3.0
    """
    graph = trace(model, example_input)
    unrolled = _Unrolled(PoweredNetwork(graph, graph.tensors(model), SIGNED))
    dag = unrolled.dag(max_paths)
    if dag.path_count > max_paths:
        raise PathError(
            f"{graph.model} has {dag.path_count} paths, over max_paths={max_paths}; raise it, or measure "
            "them without listing them, as path_norm does"
        )
    return {
        tuple(str(v) for v in (path[0][0], *(head for _, head in path[:-1]))): product
        for path, product in dag.path_vector().items()
    }


SIGNED = Arithmetic(1.0, centered=False, as_given=True)
"""Sums of the network itself: weights keep their sign."""


@dataclass
class _Unrolled:
    """Every unit of a network by name, and the weight of every edge."""

    network: PoweredNetwork
    names: list[str] = field(default_factory=list)
    weights: dict[tuple[str, str], float] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @torch.no_grad()
    def dag(self, max_paths: int) -> Dag[str]:
        graph = self.network.graph
        values: list[Tensor] = []
        for k, node in enumerate(graph.nodes):
            values.append(self.visit(k, node, [values[source] for source in node.inputs]))
        outputs = []
        for k in graph.ends:
            for unit in values[k].flatten().tolist():
                outputs.append(f"out of {self.names[unit]}")
                self.weights[self.names[unit], outputs[-1]] = 1.0
        fed = {head for _, head in self.weights}
        starts = {*self.inputs, *self.constants}
        for name in self.names:
            if name not in fed and name not in starts:
                self.join("nothing", name, 0.0)
        constants = [*self.constants, *(["nothing"] if any(u == "nothing" for u, _ in self.weights) else [])]
        return Dag(self.weights, self.inputs, outputs, constants, fixed=(), linear=(), max_paths=max_paths)

    def units(self, node: Node) -> Tensor:
        """A new unit for every entry of a node's value: a layer's output by its module, a bias by its
        parameter, a sum by the module and a plus."""
        operation = node.operation
        label = node.where or type(operation).__name__.lower()
        if isinstance(operation, Begin):
            label = operation.reason
        elif isinstance(operation, Source) and operation.weight.parameter is not None:
            label = operation.weight.parameter.name
        elif isinstance(operation, Add):
            label = f"{node.where}+"
        count = self.labels[label] = self.labels.get(label, 0) + 1
        if count > 1:
            label = f"{label}#{count}"
        start = len(self.names)
        size = math.prod(node.shape)
        index = [torch.unravel_index(torch.tensor(k), node.shape) for k in range(size)]
        self.names += [f"{label}[{','.join(str(int(i)) for i in places)}]" for places in index]
        return torch.arange(start, start + size).reshape(node.shape)

    def visit(self, k: int, node: Node, inputs: list[Tensor]) -> Tensor:
        operation = node.operation
        if isinstance(operation, View):
            return view_tensor(operation, inputs[0])
        if isinstance(operation, Cat):
            return torch.cat(inputs, operation.dim)
        if isinstance(operation, Square):
            raise PathError("the paths of a network of squares are no list: its units join two at a time")
        out = self.units(node)
        if isinstance(operation, Begin):
            self.inputs += [self.names[unit] for unit in out.flatten().tolist()]
            return out
        weight = self.network.weight(k)
        if isinstance(operation, Source):
            if "one" not in self.constants:
                self.constants.append("one")
            row = self.evaluate(operation, [], weight, node.shape)
            self.connect(["one"], out, row.reshape(-1, 1))
            return out
        for place, units in enumerate(inputs):
            matrix = self.matrix(operation, place, [tuple(i.shape) for i in inputs], weight, node.shape)
            self.connect([self.names[u] for u in units.flatten().tolist()], out, matrix)
        return out

    def evaluate(
        self, operation: Operation, inputs: list[Tensor], weight: Tensor | None, shape: Shape
    ) -> Tensor:
        """The value of a node itself, signs included."""
        zero = torch.zeros((), dtype=torch.float64)
        values = [Scaled(x, zero) for x in inputs]
        return apply(SIGNED, operation, values, weight, shape, self.network.device).mantissa

    def matrix(
        self, operation: Operation, place: int, shapes: list[Shape], weight: Tensor | None, shape: Shape
    ) -> Tensor:
        """The coefficients of one input of a node, column by column."""
        columns = []
        for k in range(math.prod(shapes[place])):
            basis = [torch.zeros(s, dtype=torch.float64) for s in shapes]
            basis[place].view(-1)[k] = 1
            columns.append(self.evaluate(operation, basis, weight, shape).flatten())
        return torch.stack(columns, 1) if columns else torch.zeros(math.prod(shape), 0)

    def connect(self, tails: list[str], heads: Tensor, matrix: Tensor) -> None:
        for o, i in matrix.nonzero().tolist():
            self.join(tails[i], self.names[int(heads.flatten()[o])], float(matrix[o, i]))

    def join(self, tail: str, head: str, weight: float) -> None:
        if (tail, head) in self.weights:  # a value added to itself: a Dag has no parallel edges
            between = f"{tail} again, to {head}, {len(self.weights)}"
            self.weights[tail, between] = 1.0
            tail = between
        self.weights[tail, head] = weight
