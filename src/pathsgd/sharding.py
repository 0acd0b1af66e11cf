"""Models whose parameters are sharded over ranks (DTensor): by fully_shard, tensor parallel, or both.

Says which part of a parameter this rank holds, and adds up numbers over the ranks that hold the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pathsgd._torch import all_gather, forward_hooks, local_tensor, module_dicts, without_values
from pathsgd.errors import PathError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, of which a rank may hold a part only. To import that class would take
    longer than all of this library."""
    return hasattr(type(tensor), "placements")


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them is; of many tensors there are few types."""
    return any(hasattr(kind, "placements") for kind in set(map(type, tensors)))


@dataclass(frozen=True)
class Shard:
    """A cut of a tensor, of which this rank keeps ``length`` entries of one axis, from ``start`` on."""

    dim: int
    start: int
    length: int
    size: int
    """The size of the axis."""
    group: dist.ProcessGroup

    @property
    def largest(self) -> int:
        """The length of the longest part: torch gives all ranks but the last ones so many."""
        return -(-self.size // self.ranks)

    @property
    def ranks(self) -> int:
        """Over how many the axis is sharded."""
        return dist.get_world_size(self.group)

    def bounds(self, rank: int) -> tuple[int, int]:
        """The indices at which the part of a rank begins and ends."""
        return min(rank * self.largest, self.size), min((rank + 1) * self.largest, self.size)

    def of(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of units that lie along ``dim``."""
        return x.narrow(dim, self.start, self.length)


def gather_parts(parts: Sequence[tuple[Shard, Tensor, int]]) -> list[Tensor]:
    """The whole of tensors of which every rank holds a part along an axis, by one collective call; all are
    sharded over the same ranks."""
    padded = []
    for shard, part, dim in parts:
        rows = part.movedim(dim, 0)
        padded.append(rows.new_zeros(shard.largest, *rows.shape[1:]))
        padded[-1][: len(rows)] = rows
    flat = torch.cat([rows.flatten() for rows in padded])
    ranks = parts[0][0].ranks
    gathered = flat.new_empty(ranks * len(flat))
    all_gather(gathered, flat, parts[0][0].group)
    columns = gathered.view(ranks, -1).split([rows.numel() for rows in padded], 1)
    return [
        column.reshape(-1, *rows.shape[1:])[: shard.size].movedim(0, dim)
        for (shard, _, dim), rows, column in zip(parts, padded, columns, strict=True)
    ]


def shards_of(tensor: Tensor) -> tuple[Shard, ...]:
    """Which part of a tensor this rank holds: the whole is cut as the first says, what is left as the second.
    Nothing if it is all of it."""
    if not is_sharded(tensor):
        return ()
    mesh, shape = tensor.device_mesh, list(tensor.shape)
    shards = []
    for k in _order_of_cuts(tensor):
        dim: int = tensor.placements[k].dim % len(shape)  # type: ignore[attr-defined]
        size = shape[dim]
        most = -(-size // mesh.size(k))
        start = min(mesh.get_local_rank(k) * most, size)
        shape[dim] = min(most, size - start)
        shards.append(Shard(dim, start, shape[dim], size, mesh.get_group(k)))
    if shape != list(local_part(tensor).shape):
        raise _unsupported(tensor)
    return tuple(shards)


def _order_of_cuts(tensor: DTensor) -> list[int]:
    """The axes of the device mesh over which a tensor is sharded, in the order in which it was cut: from left
    to right, but for fully_shard of what is tensor parallel, which cuts the parts (_StridedShard)."""
    from torch.distributed.tensor import Shard as Placed

    first: list[int] = []
    last: list[int] = []
    for k, placement in enumerate(tensor.placements):
        if placement.is_replicate() or tensor.device_mesh.size(k) == 1:
            continue
        if hasattr(placement, "split_factor"):
            last.insert(0, k)
        elif type(placement) is Placed:
            first.append(k)
        else:
            raise _unsupported(tensor)
    return first + last


def _unsupported(tensor: DTensor) -> PathError:
    return PathError(
        f"a parameter with placements {tuple(tensor.placements)} on {tensor.device_mesh} "
        "is not supported: it may be replicated, sharded by fully_shard, tensor parallel, or both"
    )


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, sharing its memory."""
    if not is_sharded(tensor):
        return tensor
    return tensor.to_local() if torch.is_grad_enabled() else local_tensor(tensor)


def place_like(local: Tensor, like: Tensor) -> Tensor:
    """The tensor whose local part this is, sharded as another of the same shape."""
    if not is_sharded(like):
        return local
    return type(like).from_local(
        local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def place_gradients(parameters: Iterable[Tensor]) -> None:
    """Has the gradient of every sharded parameter lie as the parameter does. A collective call for those that
    do not, such as a sum over ranks that is not yet taken."""
    for p in parameters:
        grad = p.grad
        if is_sharded(p) and grad is not None and is_sharded(grad) and grad.placements != p.placements:
            p.grad = grad.redistribute(placements=p.placements)


def reduce_over_ranks(values: Tensor, shards: Sequence[tuple[Shard, ...]], largest: bool = False) -> Tensor:
    """The sums (or the maxima) over all ranks that hold parts of something.

    A collective call, one for each group of ranks.

    Args:
        values: of this rank's parts, along the last axis.
        shards: those of each of them.
        largest: whether it is the maximum.
    """
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for k, own in enumerate(shards):
        for shard in own:
            by_group.setdefault(shard.group, []).append(k)
    for group, places in by_group.items():
        every = len(places) == values.shape[-1]
        index = None if every else torch.tensor(places, device=values.device)
        parts = (values if index is None else values[..., index]).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(parts, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        values = parts if index is None else values.index_copy(-1, index, parts)
    return values


# Tracing


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
                for key, hook in list(hooks.items()):
                    if (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
                        del hooks[key]
        yield
    finally:
        for registry, items in saved:
            registry.clear()
            registry.update(items)


def _registries(module: nn.Module) -> list[dict[Any, Any]]:
    return [*module_dicts(module)[1:], *forward_hooks(module)]
