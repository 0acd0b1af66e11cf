"""pi(w): the product of weights along every path of a small network, signs included."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from pathsgd.errors import PathError
from pathsgd.geometry.operations.apply import apply
from pathsgd.geometry.passes import PoweredNetwork
from pathsgd.geometry.scaled import Arithmetic, Scaled, make_zero
from pathsgd.graph.nodes import Add, Begin, Cat, Node, Source, Square, View
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
    outputs = unrolled.find_outputs()
    count = sum(unrolled.counts[unit] for unit in outputs)
    if count > max_paths:
        raise PathError(
            f"{graph.model} has {count} paths, over max_paths={max_paths}; raise it, or measure "
            "them without listing them, as path_norm does"
        )
    return unrolled.list_paths(outputs)


SIGNED = Arithmetic(1.0, centered=False, as_given=True)
"""Sums of the network itself: weights keep their sign."""


@dataclass
class _Unrolled:
    """The units of a network in order of evaluation. The first is the constant unit."""

    network: PoweredNetwork
    names: list[str] = field(default_factory=lambda: ["one"])
    into: list[list[tuple[int, float]]] = field(default_factory=lambda: [[]])
    """By unit, those that lead into it, with the weights of the edges."""
    counts: list[int] = field(default_factory=lambda: [1])
    """By unit, the paths that arrive at it; 1 where they begin."""
    labels: Counter[str] = field(default_factory=Counter)

    @torch.no_grad()
    def find_outputs(self) -> list[int]:
        """Unrolls the network, and returns the units in which paths end."""
        graph = self.network.graph
        values: list[Tensor] = []
        for k, node in enumerate(graph.nodes):
            values.append(self.visit(k, node, [values[source] for source in node.inputs]))
        return [unit for k in graph.ends for unit in values[k].flatten().tolist()]

    def list_paths(self, outputs: list[int]) -> dict[tuple[str, ...], float]:
        """The product of weights along every path, from its end to its beginning."""
        paths: dict[tuple[str, ...], float] = {}
        begun: list[tuple[tuple[str, ...], float, int]] = [((), 1.0, unit) for unit in reversed(outputs)]
        while begun:
            onward, product, unit = begun.pop()
            path = (self.names[unit], *onward)
            for tail, weight in self.into[unit]:
                if self.counts[tail]:
                    begun.append((path, product * weight, tail))
            if not self.into[unit] and self.counts[unit]:
                while path in paths:  # a value that is added to itself, or returned twice
                    path = (*path, "again")
                paths[path] = product
        return paths

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
        self.labels[label] += 1
        if self.labels[label] > 1:
            label = f"{label}#{self.labels[label]}"
        start = len(self.names)
        places = itertools.product(*map(range, node.shape))
        self.names += [f"{label}[{','.join(map(str, place))}]" for place in places]
        units = torch.arange(start, len(self.names))
        self.into += [[] for _ in units]
        self.counts += [int(isinstance(operation, Begin)) for _ in units]
        return units.reshape(node.shape)

    def visit(self, k: int, node: Node, inputs: list[Tensor]) -> Tensor:
        """The units of a node's value, joined to those that it is computed from."""
        operation, device = node.operation, self.network.device
        if isinstance(operation, View):
            return view_tensor(operation, inputs[0])
        if isinstance(operation, Cat):
            return torch.cat(inputs, operation.dim)
        if isinstance(operation, Square):
            raise PathError("the paths of a network of squares are no list: its units join two at a time")
        out = self.units(node)

        def evaluate(*values: Tensor) -> Tensor:
            scaled = [Scaled(x, make_zero(device)) for x in values]
            return apply(SIGNED, operation, scaled, self.network.weight(k), node.shape, device).mantissa

        if isinstance(operation, Source):
            self.connect(torch.tensor([0]), out, evaluate())
        elif inputs:
            zeros = tuple(torch.zeros(units.shape, dtype=torch.float64, device=device) for units in inputs)
            for units, matrix in zip(inputs, jacobian(evaluate, zeros), strict=True):
                self.connect(units, out, matrix)
        return out

    def connect(self, tails: Tensor, heads: Tensor, matrix: Tensor) -> None:
        """Edges where the coefficients of the heads by tails are not zero."""
        matrix = matrix.reshape(heads.numel(), tails.numel())
        for o, i in matrix.nonzero().tolist():
            head, tail = int(heads.flatten()[o]), int(tails.flatten()[i])
            self.into[head].append((tail, float(matrix[o, i])))
            self.counts[head] += self.counts[tail]
