"""Chains of linear layers, for which Path-SGD is recommended: gamma is two vectors a layer and nothing else.

A region that is one stack of linear layers, biases included, on vectors. ``into[k]`` is gamma_in of the
inputs of layer k and ``out[k]`` gamma_out of its outputs:

    into[k + 1] = |W_k|^p into[k] + |b_k|^p        out[k - 1] = |W_k|^p^T out[k]

Both sums go over the chain from its two ends, so the layer in the middle is read once for both. They are
taken by blocks that stay in the cache on a CPU (:mod:`pathsgd.paths.blocked`), or by kernels on a GPU
(:mod:`pathsgd.paths.kernels`), and so is the step: no matrix is written but the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pathsgd._torch import is_transforming
from pathsgd.graph.nodes import Add, Begin, Expand, Linear, Permute, Reshape, Slice, Source
from pathsgd.graph.path_graph import PathGraph
from pathsgd.training.capture import has_triton

ORDERS = (1, 2, 4)
"""The p whose powers and roots are products and square roots."""


@dataclass(frozen=True)
class Layer:
    """``y = W x + b``, by the names of its parameters."""

    weight: str
    bias: str | None
    outputs: int
    inputs: int

    @property
    def names(self) -> list[str]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


Chain = tuple[Layer, ...]


class Moved(NamedTuple):
    """A parameter with what moves it."""

    parameter: Tensor
    grad: Tensor
    buffer: Tensor | None  # of momentum
    lr: float | Tensor
    weight_decay: float

    @property
    def tensors(self) -> list[Tensor]:
        return [self.parameter, self.grad, *([] if self.buffer is None else [self.buffer])]


@dataclass(frozen=True)
class Rule:
    """The options that all parameters of a chain have in common."""

    p: int
    momentum: float
    nesterov: bool
    maximize: bool


Moves = Sequence[tuple[Moved, Moved | None]]
"""The weight and the bias of every layer."""


class ChainStep(Protocol):
    """Moves the layers of one chain."""

    def measure(self, moves: Moves, p: int) -> bool:
        """Measures gamma of the weights as they are; false if it is out of range."""

    def move(self, moves: Moves, rule: Rule) -> None:
        """Takes a step by the gammas that were measured."""


def choose_device(moves: Moves) -> torch.device | None:
    """The device on which a chain with these parameters can be moved, or None."""
    tensors = [t for layer in moves for moved in layer if moved is not None for t in moved.tensors]
    first = tensors[0]
    kinds = {(t.layout, t.device, t.dtype) for t in tensors}
    is_supported = first.device.type == "cpu" or (first.is_cuda and has_triton())
    if kinds != {(torch.strided, first.device, torch.float32)} or not is_supported or is_transforming():
        return None
    return first.device if all(t.is_contiguous() for t in tensors) else None


def order_sums(count: int) -> list[dict[int, tuple[bool, bool]]]:
    """In rounds, the layers of a chain that are read, and whether for ``into`` of the next layer and for
    ``out`` of the one before."""
    rounds: list[dict[int, tuple[bool, bool]]] = []
    for r in range(count - 1):
        first, last = r, count - 1 - r
        rounds.append({first: (True, True)} if first == last else {first: (True, False), last: (False, True)})
    return rounds


def find_chains(graph: PathGraph) -> list[Chain]:
    """Every region that is a chain of at least two layers, each of whose parameters is used once."""
    uses = Counter(weight.parameter.name for _, weight in graph.weights() if weight.parameter is not None)
    chains = []
    for region in graph.parameter_regions():
        chain = _find_chain(graph, [k for k in range(len(graph.nodes)) if graph.regions[k] == region])
        names = [name for layer in chain for name in layer.names]
        if len(chain) > 1 and all(uses[n] == 1 and graph.parameters[n].normalised for n in names):
            chains.append(chain)
    return chains


def _find_chain(graph: PathGraph, members: list[int]) -> Chain:
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
            case Source(weight) if weight.parameter is not None and not (
                weight.factors or weight.parameter.shift
            ):
                if any(not isinstance(view, Reshape) for view in weight.parameter.views):
                    return ()
                sources[k] = weight.parameter.name
            case Linear(weight) if weight.parameter is not None and not (
                weight.factors or weight.parameter.shift
            ):
                (source,) = node.inputs
                begins = not layers and source in ones
                if weight.parameter.views or not (begins or source == top) or math.prod(node.shape[:-1]) != 1:
                    return ()
                layers.append(Layer(weight.parameter.name, None, *weight.shape))
                top = k
            case Add() if len(node.inputs) == 2 and node.inputs.count(top) == 1:
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
