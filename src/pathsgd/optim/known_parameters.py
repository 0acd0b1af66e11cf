"""The Parameters that an optimizer was made with, by identity: those of a copy are others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pathsgd.errors import PathError
from pathsgd.optim.model_tensors import ModelTensors


class KnownParameters:
    """Those of one model.

    Attributes:
        names: by the id of a Parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._checked_walk = 0

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """At least one parameter of the optimizer is the model's; others may come along."""
        parameters = [parameter for group in groups for parameter in group["params"]]
        if parameters and not any(id(parameter) in self.names for parameter in parameters):
            raise TypeError(
                "none of these parameters belongs to the model the graph was traced from (those of a copy "
                "do not), so this would silently be SGD: trace the model they belong to"
            )

    def check_model(self, tensors: ModelTensors) -> None:
        """The model still has the Parameters it had."""
        if self._checked_walk != tensors.walks or not tensors.is_same_structure():
            self._checked_walk = -1
        self.check_walk(tensors)

    def check_walk(self, tensors: ModelTensors) -> None:
        """The same, right after its tensors were read."""
        if self._checked_walk == tensors.walks:
            return
        self.check_all()
        self._checked_walk = tensors.walks

    def check_all(self) -> None:
        """The same, by a walk over all modules."""
        for name, parameter in self.model.named_parameters():
            if self.names.get(id(parameter)) != name:
                raise PathError(
                    f"parameter {name!r} is not the one the optimizer was made with (it was replaced or "
                    "added since, as fully_shard does); make the optimizer again"
                )

    def __getstate__(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    def __setstate__(self, state: dict[str, nn.Module]) -> None:
        KnownParameters.__init__(self, state["model"])
