"""PathGraph: the structure of a traced network. Names and integers only, so it copies and pickles."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pathsgd.errors import PathError
from pathsgd.graph.nodes import Node, Shape, Weight, Weighted


@dataclass(frozen=True)
class ParameterInfo:
    """What the graph knows of one parameter."""

    name: str
    shape: Shape
    trainable: bool
    roles: tuple[str, ...] = ()
    regions: tuple[int, ...] = ()
    normalised: bool = False
    reason: str = ""
    """Why it is not path-normalised (empty if it is)."""
    aliases: tuple[str, ...] = ()
    """Other names under which the model holds the same Parameter."""


@dataclass(frozen=True, eq=False, repr=False)
class PathGraph:
    """The paths of a network: nodes in order of evaluation, where paths end, and what is outside.

    ``ends`` maps a node to why its units count as outputs of a region; ``outputs`` are the nodes the
    model returns. ``regions[k]`` is the region of node k. ``print(graph)`` is a report.
    """

    model: str
    nodes: tuple[Node, ...]
    ends: Mapping[int, str]
    outputs: tuple[int, ...]
    regions: tuple[int, ...]
    parameters: Mapping[str, ParameterInfo]
    notes: tuple[str, ...] = ()
    boundaries: tuple[tuple[int, str, str], ...] = ()
    """Where regions end inside the network: (node, module that ends it, reason)."""

    def weights(self) -> Iterator[tuple[int, Weight]]:
        """Every node with edge weights, with them."""
        for k, node in enumerate(self.nodes):
            if isinstance(node.operation, Weighted):
                yield k, node.operation.weight

    def parameter_regions(self) -> list[int]:
        """The regions that hold parameters, in order; reports number these."""
        return sorted({region for info in self.parameters.values() for region in info.regions})

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors of ``model`` that this graph names, checked to be those it was traced from."""
        model = unwrap(model)
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        fresh = set(tensors) - set(self.parameters)
        if fresh:
            name = sorted(fresh)[0]
            raise PathError(
                f"the model has a parameter {name!r} that it did not have when it was traced; "
                "trace the model again"
            )
        self.check(tensors)
        tensors.update(model.named_buffers(remove_duplicate=False))
        return tensors

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """These are the parameters the graph was traced with, by name and shape, and hold values."""
        for name, info in self.parameters.items():
            if name not in tensors:
                raise PathError(f"there is no parameter {name!r} any more; trace the model again")
            if tuple(tensors[name].shape) != info.shape:
                raise PathError(
                    f"parameter {name!r} has shape {tuple(tensors[name].shape)} but had "
                    f"{info.shape} when the model was traced; trace it again"
                )
            if tensors[name].is_meta:
                raise PathError(f"parameter {name!r} is on the meta device and has no values to measure")

    def __repr__(self) -> str:
        return f"<{str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        from pathsgd.graph.report import report

        return report(self)


_traced_from: weakref.WeakKeyDictionary[PathGraph, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def remember_model(graph: PathGraph, model: nn.Module) -> None:
    """Keeps a weak reference from a graph to the model it was traced from, outside the graph."""
    _traced_from[graph] = weakref.ref(model)


def traced_model(graph: PathGraph) -> nn.Module | None:
    """The model a graph was traced from, if it is still alive and the graph is no copy."""
    reference = _traced_from.get(graph)
    return reference() if reference is not None else None


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside the wrappers torch puts around it."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = inner
        else:
            return model


def compute_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Path quantities are computed in fp32, or in fp64 as soon as one tensor is."""
    double = any(t.dtype == torch.float64 for t in tensors.values())
    return torch.float64 if double else torch.float32
