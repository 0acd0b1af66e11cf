"""Models whose parameters are sharded over ranks (DTensor), as ``fully_shard`` makes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn

from pathsgd._torch import forward_hooks, module_dicts, without_values

if TYPE_CHECKING or dist.is_available():
    from torch.distributed.tensor import DTensor

_SHARDED: tuple[type[Tensor], ...] = (DTensor,) if dist.is_available() else ()


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, of which a rank may hold a part only."""
    return isinstance(tensor, _SHARDED)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is; of many tensors there are few types."""
    return any(issubclass(kind, _SHARDED) for kind in set(map(type, tensors)))


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """For tracing: inside, sharded parameters have their global shape and no values, and nothing is gathered
    or scattered before and after a forward pass."""
    if not any(map(is_sharded, (*model.parameters(), *model.buffers()))):
        yield
        return
    saved = [(registry, registry.copy()) for module in model.modules() for registry in _registries(module)]
    whole: dict[int, Tensor] = {}  # one for all names of a tensor
    try:
        for module in model.modules():
            for tensors in module_dicts(module)[1:]:
                for name, tensor in tensors.items():
                    if tensor is not None and is_sharded(tensor):
                        if id(tensor) not in whole:
                            whole[id(tensor)] = without_values(tensor)
                        tensors[name] = whole[id(tensor)]
            for hooks in forward_hooks(module):
                for key in [key for key, hook in hooks.items() if _is_of_torch_distributed(hook)]:
                    del hooks[key]
        yield
    finally:
        for registry, items in saved:
            registry.clear()
            registry.update(items)


def _registries(module: nn.Module) -> list[dict[Any, Any]]:
    return [*module_dicts(module)[1:], *forward_hooks(module)]


def _is_of_torch_distributed(hook: object) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.")
