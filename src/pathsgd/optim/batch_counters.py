"""Whether a forward pass that writes running statistics shows: torch does not count these writes, but batch
norms count the batches they have seen."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

COUNTING = (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)


def are_counted(model: nn.Module, buffers: Collection[str]) -> bool:
    """Whether no forward pass writes any of these without writing another of them in a way that shows."""

    def is_counted(name: str) -> bool:
        owner, _, _ = name.rpartition(".")
        counter = f"{owner}.num_batches_tracked".lstrip(".")
        return type(model.get_submodule(owner)).forward in COUNTING and counter in buffers

    return all(map(is_counted, buffers))
