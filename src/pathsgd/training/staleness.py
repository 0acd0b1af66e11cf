"""Staleness: which tensors a model has, and whether anything has written or replaced them since.

torch counts the writes to every tensor (its version). What an optimizer keeps of the weights is valid as long
as the model holds the same Parameters, they lie where they lay, and their versions are the same. A write
through ``.data``, numpy or a fused CPU optimizer is not counted: an optimizer that keeps something has a
method ``refresh()`` for that.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import nn

from pathsgd._torch import Version, is_compiling, module_dicts, versions
from pathsgd.errors import PathError
from pathsgd.graph.edge_weights import Tensors
from pathsgd.graph.path_graph import PathGraph
from pathsgd.sharding import any_sharded, local_part


class ModelTensors:
    """The tensors of one model by name, without a walk over its modules at every step.

    The walk costs more than the step of a small network. Modules keep their children and tensors in
    dictionaries: as long as these hold the same objects a walk would find the same.

    Attributes:
        names: of the Parameters that the model had when this was made, by id.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._dicts: list[dict[str, object]] = []
        self._held: list[list[object]] = []
        self._graph: PathGraph | None = None
        self._tensors: Tensors = {}
        self._buffer_places: list[tuple[str, dict[str, Any], str]] = []

    def read(self, graph: PathGraph) -> Tensors:
        """The tensors that a graph names, as they are now.

        Raises:
            PathError: the parameters are not those that were traced, or not those the optimizer was made
                with.
        """
        if graph is self._graph and not is_compiling() and self.is_same_structure():
            graph.check(self._tensors)
            return {**self._tensors, **{name: own[key] for name, own, key in self._buffer_places}}
        tensors = graph.tensors(self.model, sharded=True)
        if not is_compiling():
            self.check_identity()
            if graph is self._graph:  # the parameters are the same, so what has no parameters is not
                raise PathError(
                    "a module was replaced, added or removed since the model was traced, so its paths may be "
                    "others; make the optimizer again"
                )
            self.remember_structure()
            self._graph = graph
            self._tensors = {name: tensors[name] for name in graph.parameters}
            self._buffer_places = []
            for name in (name for name in tensors if name not in graph.parameters):
                module, _, key = name.rpartition(".")
                self._buffer_places.append((name, module_dicts(self.model.get_submodule(module))[2], key))
        return tensors

    def remember_structure(self) -> None:
        """Keeps what all modules hold now."""
        self._dicts = [own for module in self.model.modules() for own in module_dicts(module)[:2]]
        self._held = [list(own.values()) for own in self._dicts]

    def is_same_structure(self) -> bool:
        """Whether all modules hold the children and parameters that they held."""
        return bool(self._dicts) and all(
            len(own) == len(held) and all(map(operator.is_, own.values(), held))
            for own, held in zip(self._dicts, self._held, strict=True)
        )

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """At least one parameter of an optimizer is the model's; others may come along.

        Raises:
            TypeError: none is.
        """
        parameters = [parameter for group in groups for parameter in group["params"]]
        if parameters and not any(id(parameter) in self.names for parameter in parameters):
            raise TypeError(
                "none of these parameters belongs to the model the graph was traced from (those of a copy "
                "do not): trace the model they belong to"
            )

    def check_identity(self) -> None:
        """The model still has the Parameters it had.

        Raises:
            PathError: one was replaced or added.
        """
        for name, parameter in self.model.named_parameters():
            if self.names.get(id(parameter)) != name:
                raise PathError(
                    f"parameter {name!r} is not the one the optimizer was made with (it was replaced or "
                    "added since, as fully_shard does); make the optimizer again"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "is_same": self.is_same_structure()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ModelTensors.__init__(self, state["model"])
        if state["is_same"]:
            self.remember_structure()


def find_versions(tensors: Tensors) -> list[Version]:
    """The addresses of tensors and how often they were written. A write to a DTensor is not counted by its
    local part, nor the other way round."""
    own = list(tensors.values())
    return versions([*own, *map(local_part, own)] if any_sharded(own) else own)
