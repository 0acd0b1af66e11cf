"""Whether a forward pass has written running statistics: torch does not count those writes, but batch norms
count the batches they have seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from pathsgd._torch import module_dicts

COUNTING = (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)
BATCHES = "num_batches_tracked"


def find_counters(model: nn.Module, statistics: Iterable[str]) -> list[dict[str, Any]] | None:
    """The buffers, one of them the number of batches, of the modules that have these statistics; None if one
    of them may write them without counting."""
    found = {}
    for name in statistics:
        module = model.get_submodule(name.rpartition(".")[0])
        _, _, buffers = module_dicts(module)
        if type(module).forward not in COUNTING or buffers.get(BATCHES) is None:
            return None
        found[id(module)] = buffers
    return list(found.values())
