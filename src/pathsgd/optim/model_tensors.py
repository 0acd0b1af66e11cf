"""A model's tensors by name, without a walk over its modules at every step.

The walk costs more than the step of a small network. Modules keep their children and tensors in dictionaries:
as long as these hold the same objects, and parameters lie where they lay, a walk would find the same.
"""

from __future__ import annotations

import operator

from torch import Tensor, nn

from pathsgd._torch import is_compiling, module_dicts
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.sharded import is_sharded


class ModelTensors:
    """The tensors of one model that a graph names, see :meth:`PathGraph.tensors`.

    Attributes:
        walks: how often they had to be looked for.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._dicts: list[dict[str, object]] = []
        self._lengths: list[int] = []
        self._kept: list[object] = []
        self._places: dict[str, tuple[dict[str, object], str]] = {}
        self._graph: PathGraph | None = None
        self._addresses: list[int] = []
        self.walks = 0

    def read(self, graph: PathGraph) -> Tensors:
        """The tensors as they are now.

        Raises:
            PathError: the parameters are not those that were traced.
        """
        if graph is self._graph and not is_compiling() and self.is_same_structure():
            tensors: dict[str, Tensor] = {name: owner[key] for name, (owner, key) in self._places.items()}  # type: ignore[misc]
            if self._addresses == [tensor.data_ptr() for tensor in tensors.values()]:
                return tensors
        tensors = graph.tensors(self.model, sharded=True)
        if not is_compiling() and not any(map(is_sharded, tensors.values())):
            self._remember(graph, tensors)
        return tensors

    def is_same_structure(self) -> bool:
        """Whether all modules hold the children and parameters that they held at the last walk."""
        lengths = [len(own) for own in self._dicts]
        found = [value for own in self._dicts for value in own.values()]
        return bool(lengths) and lengths == self._lengths and all(map(operator.is_, found, self._kept))

    def _remember(self, graph: PathGraph, tensors: Tensors) -> None:
        self.walks += 1
        self._dicts = []
        for module in self.model.modules():
            children, parameters, _ = module_dicts(module)
            self._dicts += [children, parameters]
        self._lengths = [len(own) for own in self._dicts]
        self._kept = [value for own in self._dicts for value in own.values()]
        self._places = {}
        for name in tensors:
            prefix, _, key = name.rpartition(".")
            _, parameters, buffers = module_dicts(self.model.get_submodule(prefix))
            self._places[name] = (parameters if key in parameters else buffers), key
        self._graph, self._addresses = graph, [tensor.data_ptr() for tensor in tensors.values()]

    def __getstate__(self) -> dict[str, object]:
        return {"model": self.model}

    def __setstate__(self, state: dict[str, nn.Module]) -> None:
        ModelTensors.__init__(self, state["model"])
