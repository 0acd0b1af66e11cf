"""Chains of linear layers: where gamma_in and gamma_out are one vector per layer and nothing else.

A region that is one stack of linear layers, biases included, on vectors. There a step can carry gamma from
one step to the next without reading a weight twice (:mod:`pathsgd.optim.fused`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from pathsgd.graph.nodes import Add, Begin, Expand, Linear, Permute, Reshape, Slice, Source
from pathsgd.graph.path_graph import PathGraph


@dataclass(frozen=True)
class Layer:
    """``y = W x + b``, by the names of its parameters."""

    weight: str
    bias: str | None
    outputs: int
    inputs: int


Chain = tuple[Layer, ...]


def chains(graph: PathGraph) -> list[Chain]:
    """Every region that is a chain of at least two layers, each of whose parameters is used once."""
    uses = Counter(weight.parameter.name for _, weight in graph.weights() if weight.parameter is not None)
    found = []
    for region in graph.parameter_regions():
        chain = _chain(graph, [k for k in range(len(graph.nodes)) if graph.regions[k] == region])
        names = [name for layer in chain for name in (layer.weight, layer.bias) if name is not None]
        if len(chain) > 1 and all(uses[n] == 1 and graph.parameters[n].normalised for n in names):
            found.append(chain)
    return found


def _chain(graph: PathGraph, members: list[int]) -> Chain:
    """The layers of a region in order; none if anything else is in it."""
    layers: list[Layer] = []
    ones: set[int] = set()  # views of values where paths begin
    top: int | None = None  # the output of the last layer
    sources: dict[int, str] = {}
    for k in members:
        node = graph.nodes[k]
        operation = node.operation
        if k in graph.ends and k != members[-1]:
            return ()
        match operation:
            case Begin():
                ones.add(k)
            case Reshape() | Permute() | Slice() | Expand() if set(node.inputs) <= ones:
                ones.add(k)
            case Reshape() if node.inputs == (top,) and sum(n > 1 for n in node.shape) <= 1:
                top = k
            case Source(weight) if weight.parameter is not None and not weight.factors:
                if any(not isinstance(view, Reshape) for view in weight.parameter.views):
                    return ()
                sources[k] = weight.parameter.name
            case Linear(weight) if weight.parameter is not None and not weight.factors:
                (source,) = node.inputs
                begins = not layers and source in ones
                if weight.parameter.views or not (begins or source == top) or math.prod(node.shape[:-1]) != 1:
                    return ()
                layers.append(Layer(weight.parameter.name, None, *weight.shape))
                top = k
            case Add() if len(node.inputs) == 2 and top in node.inputs:
                (other,) = (source for source in node.inputs if source != top)
                if other not in sources or layers[-1].bias is not None:
                    return ()
                last = layers[-1]
                if graph.parameters[sources[other]].shape != (last.outputs,):
                    return ()
                layers[-1] = Layer(last.weight, sources.pop(other), last.outputs, last.inputs)
                top = k
            case _:
                return ()
    return () if sources or top is None or top not in graph.ends else tuple(layers)
