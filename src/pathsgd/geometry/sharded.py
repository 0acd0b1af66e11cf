"""Path weights of a model whose matrices and kernels are sharded over ranks (DTensor).

What flows along paths is one number for each unit: every rank holds all of them. A matrix stays where it is:

- sharded over its outputs, a rank computes those of its rows, and the rows of all ranks are gathered;
- sharded over its inputs, a rank sums over its own, and the sums of all ranks are added up.

So what is communicated is as wide as a layer, never a weight. A transposed matrix is sharded over the other
axis, so that the backward pass follows from the same two cases. Biases and the weights of norms, which are
vectors, are gathered before. gamma of a weight is computed for the part that a rank holds.

What is sharded over two axes of a device mesh was cut twice, and the rules are applied one inside the other.
Convolutions are computed on local kernels by these rules, too: DTensor's own returns wrong channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from pathsgd._torch import all_gather, local_tensor
from pathsgd.errors import PathError
from pathsgd.geometry.extended_float import DEAD, Arithmetic, ExtendedFloat
from pathsgd.graph.nodes import Conv, Linear, Permute, Weight, Weighted
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.sharded import is_sharded

if TYPE_CHECKING or dist.is_available():
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Placed

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shard:
    """A cut of a tensor, of which this rank keeps ``length`` entries of one axis, from ``start`` on."""

    dim: int
    start: int
    length: int
    size: int
    """Of the axis."""
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
        """Where the part of a rank begins and ends."""
        return min(rank * self.largest, self.size), min((rank + 1) * self.largest, self.size)

    def of(self, x: ExtendedFloat, dim: int) -> ExtendedFloat:
        """This rank's part of units that lie along ``dim``."""
        return _narrow(x, dim, self.start, self.length)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks along ``dim``. A collective call."""
        rows = x.movedim(dim, 0)
        padded = rows.new_zeros(self.largest, *rows.shape[1:])
        padded[: len(rows)] = rows
        ranks = dist.get_world_size(self.group)
        gathered = padded.new_empty(ranks * self.largest, *rows.shape[1:])
        all_gather(gathered, padded, self.group)
        return gathered[: self.size].movedim(0, dim)


def shards_of(tensor: Tensor) -> tuple[Shard, ...]:
    """Which part of a tensor this rank holds: the whole is cut as the first says, what is left as the second.
    Nothing if it is all of it."""
    if not is_sharded(tensor):
        return ()
    mesh, shape = tensor.device_mesh, list(tensor.shape)
    found = []
    for k in _order_of_cuts(tensor):
        dim: int = tensor.placements[k].dim % len(shape)  # type: ignore[attr-defined]
        size = shape[dim]
        most = -(-size // mesh.size(k))
        start = min(mesh.get_local_rank(k) * most, size)
        shape[dim] = min(most, size - start)
        found.append(Shard(dim, start, shape[dim], size, mesh.get_group(k)))
    if shape != list(local_part(tensor).shape):
        raise _unsupported(tensor)
    return tuple(found)


def _order_of_cuts(tensor: DTensor) -> list[int]:
    """The axes of the device mesh over which a tensor is sharded, in the order in which it was cut: from left
    to right, but for fully_shard of what is tensor parallel, which cuts the parts (_StridedShard)."""
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
    """What this rank holds of a tensor, sharing its memory."""
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


# Sums over paths


def contract_shards(
    contract: Callable[[Arithmetic, ExtendedFloat, Tensor], ExtendedFloat],
    arithmetic: Arithmetic,
    x: ExtendedFloat,
    weight: Tensor,
) -> ExtendedFloat:
    """A linear layer whose matrix is sharded. A collective call."""
    return _by_shards(lambda x, w: contract(arithmetic, x, w), arithmetic, x, weight, -1, 0, 1)


def conv_shards(
    conv: Callable[[Arithmetic, Conv, ExtendedFloat, Tensor], ExtendedFloat],
    arithmetic: Arithmetic,
    operation: Conv,
    x: ExtendedFloat,
    weight: Tensor,
) -> ExtendedFloat:
    """A convolution whose kernel is sharded. A collective call."""
    outputs, inputs = (1, 0) if operation.transposed else (0, 1)
    x = arithmetic.align(x, [d for d in range(x.mantissa.dim()) if d != 1])
    return _by_shards(
        lambda x, w: conv(arithmetic, operation, x, w), arithmetic, x, weight, 1, outputs, inputs
    )


def _by_shards(
    compute: Callable[[ExtendedFloat, Tensor], ExtendedFloat],
    arithmetic: Arithmetic,
    x: ExtendedFloat,
    weight: Tensor,
    channels: int,
    outputs: int,
    inputs: int,
) -> ExtendedFloat:
    """``compute`` on the local part of a weight, and what it takes to make its result that of the whole:
    ``channels`` is the axis of units, ``outputs`` and ``inputs`` those of the weight."""
    shards, local = shards_of(weight), local_part(weight)
    channels %= x.mantissa.dim()
    if shards and 0 in local.shape:
        # There are more ranks than rows. One that counts for nothing keeps all shapes as they are elsewhere.
        local = local.new_zeros([max(n, 1) for n in local.shape])

    def run(x: ExtendedFloat, shards: Sequence[Shard]) -> ExtendedFloat:
        if not shards:
            return compute(x, local)
        shard, *inner = shards
        if shard.dim == outputs:
            y = _expand_exponent(run(x, inner), x, channels)
            y = y if shard.length else _narrow(y, channels, 0, 0)
            exponent = None if y.exponent is None else shard.gather(y.exponent, channels)
            return ExtendedFloat(shard.gather(y.mantissa, channels), exponent)
        assert shard.dim == inputs
        own = shard.of(x, channels) if shard.length else _narrow(x, channels, 0, 1)
        return _add_over_ranks(arithmetic, _expand_exponent(run(own, inner), x, channels), shard.group)

    return run(x, shards)


def _expand_exponent(y: ExtendedFloat, x: ExtendedFloat, channels: int) -> ExtendedFloat:
    """With an exponent for every unit, and for every position for which ``x`` has one: a rank may do with
    fewer, and what is communicated has the same shape on all."""
    if x.exponent is None or y.exponent is None:
        return y
    shape = [*x.exponent.shape]
    shape[channels] = y.mantissa.shape[channels]
    return ExtendedFloat(y.mantissa, y.exponent.expand(shape))


def _narrow(x: ExtendedFloat, dim: int, start: int, length: int) -> ExtendedFloat:
    exponent = x.exponent
    if exponent is not None and exponent.shape[dim] > 1:
        exponent = exponent.narrow(dim, start, length)
    return ExtendedFloat(x.mantissa.narrow(dim, start, length), exponent)


def _add_over_ranks(arithmetic: Arithmetic, x: ExtendedFloat, group: dist.ProcessGroup) -> ExtendedFloat:
    """The sum (or the maximum) over ranks. A collective call."""
    mantissa, highest = x.mantissa, None
    if x.exponent is not None:
        highest = x.exponent.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        mantissa = arithmetic.shift(mantissa, (x.exponent - highest).clamp(min=DEAD // 2))
    total = mantissa.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(arithmetic.p) else dist.ReduceOp.SUM, group=group)
    return arithmetic.keep_in_range(ExtendedFloat(total, highest))


# Parameters


def gather_vectors(graph: PathGraph, tensors: Tensors) -> Tensors:
    """The tensors in which sharded ones are whole, except the matrices and kernels that the rules above are
    for. A collective call, one for each dtype and each axis of the device mesh."""
    sharded = {name for name, tensor in tensors.items() if is_sharded(tensor) and name in graph.parameters}
    if not sharded:
        return tensors
    uses = _uses(graph)
    gathered = {name for name in sharded if not _stays_sharded(uses.get(name, []), tensors[name])}
    found = {name: local_part(t) if name in gathered else t for name, t in tensors.items()}
    left = {name: list(shards_of(tensor)) for name, tensor in tensors.items() if name in gathered}
    while any(left.values()):  # from the last cut to the first
        buckets: dict[tuple[dist.ProcessGroup, torch.dtype], dict[str, Shard]] = {}
        for name, shards in left.items():
            if shards:
                shard = shards.pop()
                buckets.setdefault((shard.group, found[name].dtype), {})[name] = shard
        for bucket in buckets.values():
            found.update(_gather_bucket(found, bucket))
    return found


def _gather_bucket(parts: Tensors, shards: dict[str, Shard]) -> dict[str, Tensor]:
    """Tensors that are sharded over the same ranks, by one collective call."""
    padded = []
    for name, shard in shards.items():
        rows = parts[name].detach().movedim(shard.dim, 0)
        whole = rows.new_zeros(shard.largest, *rows.shape[1:])
        whole[: shard.length] = rows
        padded.append(whole)
    group = next(iter(shards.values())).group
    flat = torch.cat([rows.flatten() for rows in padded])
    ranks = dist.get_world_size(group)
    gathered = flat.new_empty(ranks * len(flat))
    all_gather(gathered, flat, group)
    columns = gathered.view(ranks, -1).split([rows.numel() for rows in padded], 1)
    return {
        name: part.reshape(-1, *rows.shape[1:])[: shard.size].movedim(0, shard.dim)
        for (name, shard), rows, part in zip(shards.items(), padded, columns, strict=True)
    }


def _uses(graph: PathGraph) -> dict[str, list[Weighted]]:
    """The operations that use a parameter, by its name."""
    found: dict[str, list[Weighted]] = {}
    for node in graph.nodes:
        if isinstance(node.operation, Weighted) and node.operation.weight.parameter is not None:
            found.setdefault(node.operation.weight.parameter.name, []).append(node.operation)
    return found


def _stays_sharded(uses: Sequence[Weighted], tensor: Tensor) -> bool:
    """Whether every use of a parameter is as the whole matrix of a linear layer, or its transpose, or as the
    kernel of a convolution without groups."""
    shards = shards_of(tensor)
    return bool(uses and shards) and all(_is_whole(operation, shards) for operation in uses)


def _is_whole(operation: Weighted, shards: Sequence[Shard]) -> bool:
    weight: Weight = operation.weight
    assert weight.parameter is not None
    if weight.factors or weight.parameter.inverse:
        return False
    match operation:
        case Linear():
            return weight.parameter.views in ((), (Permute((1, 0)),))
        case Conv(groups=1):
            return not weight.parameter.views and all(shard.dim < 2 for shard in shards)
    return False


def own_ends(
    weight: Tensor, out: ExtendedFloat, into: ExtendedFloat, axis: int, outputs: int = 0
) -> tuple[ExtendedFloat, ExtendedFloat]:
    """What leaves the outputs and what arrives at the inputs of a weight, of those that this rank's part of
    it joins. ``axis`` is that of units, ``outputs`` the weight's axis of outputs."""
    axis %= out.mantissa.dim()
    for shard in shards_of(weight):
        if shard.dim == outputs:
            out = shard.of(out, axis)
        else:
            into = shard.of(into, axis)
    return out, into


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
