"""The structure of a traced network: nodes, ends of paths, parameters. Names and integers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from pathsgd.graph.nodes import Node, Shape, Weight, Weighted


class ParameterStatus(Enum):
    """The way in which a parameter takes part in paths.

    Example:
        >>> import pathsgd, torch
        >>> graph = pathsgd.trace(
        ...     torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 1))
        ... )
        >>> graph.parameters["0.weight"].status
        <ParameterStatus.ALONE: 'alone'>
    """

    NORMALISED = "normalised"
    """It shares paths with other weights: its gamma depends on them."""
    ALONE = "alone"
    """No other weight lies on its paths, so no rescaling changes it. Its gamma is a constant, the number of
    places it is used at; optimizers take 1 instead, so that Path-SGD is SGD there, at any sequence length."""
    OUTSIDE = "outside"
    """Something that is no path reads it, so no rescaling may change it."""
    UNUSED = "unused"
    """The forward pass does not use it."""


@dataclass(frozen=True)
class ParameterInfo:
    """The facts that a graph knows of one parameter.

    Attributes:
        name: as in ``model.named_parameters()``.
        shape: its shape.
        trainable: whether it requires gradients.
        status: how it takes part in paths.
        reason: why it is not path-normalised, in words; empty if it is.
        roles: what it is used as: "weight", "bias", "norm weight", ...
        regions: the regions it lies in.
        alone: how many of its entries have no other weight on their paths: all if its status is "alone",
            a part if it is path-normalised and holds several matrices, as that of queries, keys and values.
        aliases: other names under which the model holds the same Parameter.

    Example:
        >>> import pathsgd, torch
        >>> info = pathsgd.trace(torch.nn.Sequential(*map(torch.nn.Linear, (2, 3), (3, 1)))).parameters[
        ...     "0.bias"
        ... ]
        >>> info.shape, info.roles, info.normalised
        ((3,), ('bias',), True)
    """

    name: str
    shape: Shape
    trainable: bool
    status: ParameterStatus = ParameterStatus.UNUSED
    reason: str = "not used by the forward pass"
    roles: tuple[str, ...] = ()
    regions: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()
    alone: int = 0

    @property
    def normalised(self) -> bool:
        """Whether optimizers take its gamma; elsewhere they take 1."""
        return self.status is ParameterStatus.NORMALISED


@dataclass(frozen=True, eq=False, repr=False)
class Structure:
    """The fields of :class:`pathsgd.PathGraph`, for what computes on graphs without being part of one."""

    model: str
    nodes: tuple[Node, ...]
    ends: Mapping[int, str]
    outputs: tuple[int, ...]
    regions: tuple[int, ...]
    parameters: Mapping[str, ParameterInfo]
    notes: tuple[str, ...] = ()
    boundaries: tuple[tuple[int, str, str], ...] = ()
    multiplied: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    passed: frozenset[int] = frozenset()

    def weights(self) -> Iterator[tuple[int, Weight]]:
        """Every node that has edge weights.

        Returns:
            Pairs of a node's number and its weights.
        """
        for k, node in enumerate(self.nodes):
            if isinstance(node.operation, Weighted):
                yield k, node.operation.weight

    def readers(self) -> list[list[int]]:
        """The nodes that read each node.

        Returns:
            Their numbers by node; a node that reads another twice is listed twice.
        """
        readers: list[list[int]] = [[] for _ in self.nodes]
        for k, node in enumerate(self.nodes):
            for source in node.inputs:
                readers[source].append(k)
        return readers

    def parameter_regions(self) -> list[int]:
        """The regions that hold parameters.

        Returns:
            Their numbers as in :attr:`regions`, in order; reports and ``region=`` count these from 0.
        """
        return sorted({region for info in self.parameters.values() for region in info.regions})
