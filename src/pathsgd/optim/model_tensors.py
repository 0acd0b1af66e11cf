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
        self._filled: list[dict[str, object]] = []
        """Those dictionaries that are not empty,"""
        self._kept: list[object] = []
        """and what they hold."""
        self._own_buffers: list[tuple[dict[str, object], str, Tensor]] = []
        self._graph: PathGraph | None = None
        self._tensors: Tensors = {}
        self._addresses: list[int] = []
        self.walks = 0

    def read(self, graph: PathGraph) -> Tensors:
        """The tensors as they are now: in the same dictionary, if they are and lie where they did.

        Raises:
            PathError: the parameters are not those that were traced.
        """
        if graph is self._graph and not is_compiling() and self.is_same_structure():
            same = all(owner.get(key) is buffer for owner, key, buffer in self._own_buffers)
            if same and self._addresses == addresses(self._tensors):
                return self._tensors
        tensors = graph.tensors(self.model, sharded=True)
        if not is_compiling() and not any(map(is_sharded, tensors.values())):
            self._remember(graph, tensors)
        return tensors

    def is_same_structure(self) -> bool:
        """Whether all modules hold the children and parameters that they held at the last walk."""
        lengths = [len(own) for own in self._dicts]
        found = [value for own in self._filled for value in own.values()]
        return bool(lengths) and lengths == self._lengths and all(map(operator.is_, found, self._kept))

    def _remember(self, graph: PathGraph, tensors: Tensors) -> None:
        self.walks += 1
        self._dicts = []
        for module in self.model.modules():
            children, parameters, _ = module_dicts(module)
            self._dicts += [children, parameters]
        self._lengths = [len(own) for own in self._dicts]
        self._filled = [own for own in self._dicts if own]
        self._kept = [value for own in self._filled for value in own.values()]
        self._own_buffers = []
        for name, tensor in tensors.items():
            prefix, _, key = name.rpartition(".")
            _, parameters, buffers = module_dicts(self.model.get_submodule(prefix))
            if key not in parameters:
                self._own_buffers.append((buffers, key, tensor))
        self._graph, self._tensors, self._addresses = graph, tensors, addresses(tensors)

    def __getstate__(self) -> dict[str, object]:
        return {"model": self.model}

    def __setstate__(self, state: dict[str, nn.Module]) -> None:
        ModelTensors.__init__(self, state["model"])


def addresses(tensors: Tensors) -> list[int]:
    """Where they lie."""
    return [tensor.data_ptr() for tensor in tensors.values()]
