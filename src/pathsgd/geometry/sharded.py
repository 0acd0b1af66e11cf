"""Path weights of a model whose matrices and kernels are sharded over ranks (DTensor).

What flows along paths is one number for each unit: every rank holds all of them. A matrix stays where it is:

- sharded over its outputs, a rank computes those of its rows, and the rows of all ranks are gathered;
- sharded over its inputs, a rank sums over its own, and the sums of all ranks are added up.

So what is communicated is as wide as a layer, never a weight. A transposed matrix is sharded over the other
axis, so that the backward pass follows from the same two cases. Biases and the weights of norms, which are
vectors, are gathered before. gamma of a weight is computed for the part that a rank holds.

Convolutions are computed on local kernels by these rules, too: DTensor's own returns wrong channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pathsgd.errors import PathError
from pathsgd.geometry.extended_float import DEAD, Arithmetic, ExtendedFloat
from pathsgd.graph.nodes import Conv, Linear, Permute, Weight, Weighted
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.sharded import is_sharded

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that this rank holds: ``length`` entries of one axis, from ``start`` on."""

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
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        return gathered[: self.size].movedim(0, dim)


def shard_of(tensor: Tensor) -> Shard | None:
    """Which part of a tensor this rank holds; None if all of it."""
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import Shard as Placed

    mesh = tensor.device_mesh
    found = None
    for k, placement in enumerate(tensor.placements):
        if placement.is_replicate() or mesh.size(k) == 1:
            continue
        if type(placement) is not Placed or found is not None:
            raise PathError(
                f"a parameter with placements {tuple(tensor.placements)} is not supported: it may be sharded "
                "over one axis of the device mesh, and replicated over the others"
            )
        dim, size = placement.dim % tensor.dim(), tensor.shape[placement.dim]
        most = -(-size // mesh.size(k))
        start = min(mesh.get_local_rank(k) * most, size)
        found = Shard(dim, start, min(most, size - start), size, mesh.get_group(k))
    return found


def shards_of(tensor: Tensor) -> tuple[Shard, ...]:
    """The same as a sequence of cuts: empty if this rank holds all of it."""
    shard = shard_of(tensor)
    return () if shard is None else (shard,)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def place_like(local: Tensor, like: Tensor) -> Tensor:
    """The tensor whose local part this is, sharded as another of the same shape."""
    if not is_sharded(like):
        return local
    return type(like).from_local(
        local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


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
    shard, local = shard_of(weight), local_part(weight)
    if shard is None:
        return compute(x, local)
    channels %= x.mantissa.dim()
    if not shard.length:
        # There are more ranks than rows. One that counts for nothing keeps all shapes as they are elsewhere.
        local = local.new_zeros([max(n, 1) for n in local.shape])
    if shard.dim == outputs:
        y = _expand_exponent(compute(x, local), x, channels)
        y = y if shard.length else _narrow(y, channels, 0, 0)
        exponent = None if y.exponent is None else shard.gather(y.exponent, channels)
        return ExtendedFloat(shard.gather(y.mantissa, channels), exponent)
    assert shard.dim == inputs
    own = shard.of(x, channels) if shard.length else _narrow(x, channels, 0, 1)
    return _add_over_ranks(arithmetic, _expand_exponent(compute(own, local), x, channels), shard.group)


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
    return arithmetic.normalise(ExtendedFloat(total, highest))


# Parameters


def gather_vectors(graph: PathGraph, tensors: Tensors) -> Tensors:
    """The tensors in which sharded ones are whole, except the matrices and kernels that the rules above are
    for. A collective call, one for each dtype."""
    gathered = [
        name
        for name, tensor in tensors.items()
        if is_sharded(tensor) and (name in graph.parameters) and not _stays_sharded(graph, name, tensor)
    ]
    found = {name: tensor for name, tensor in tensors.items() if name not in gathered}
    shards = {name: shard_of(tensors[name]) for name in gathered}
    buckets: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, shard in shards.items():
        if shard is None:
            found[name] = local_part(tensors[name])
        else:
            buckets.setdefault((id(shard.group), tensors[name].dtype), []).append(name)
    for names in buckets.values():
        found.update(_gather_bucket(tensors, {name: shards[name] for name in names}))  # type: ignore[misc]
    return {name: found[name] for name in tensors}


def _gather_bucket(tensors: Tensors, shards: dict[str, Shard]) -> dict[str, Tensor]:
    """Tensors that are sharded over the same ranks, by one collective call."""
    padded = []
    for name, shard in shards.items():
        rows = local_part(tensors[name]).detach().movedim(shard.dim, 0)
        whole = rows.new_zeros(shard.largest, *rows.shape[1:])
        whole[: shard.length] = rows
        padded.append(whole)
    group = next(iter(shards.values())).group
    flat = torch.cat([rows.flatten() for rows in padded])
    ranks = dist.get_world_size(group)
    gathered = flat.new_empty(ranks * len(flat))
    dist.all_gather_into_tensor(gathered, flat, group=group)
    columns = gathered.view(ranks, -1).split([rows.numel() for rows in padded], 1)
    return {
        name: part.reshape(-1, *rows.shape[1:])[: shard.size].movedim(0, shard.dim)
        for (name, shard), rows, part in zip(shards.items(), padded, columns, strict=True)
    }


def _stays_sharded(graph: PathGraph, name: str, tensor: Tensor) -> bool:
    """Whether every use of a parameter is as the whole matrix of a linear layer, or its transpose, or as the
    kernel of a convolution without groups."""
    uses = [
        node.operation
        for node in graph.nodes
        if isinstance(node.operation, Weighted)
        and node.operation.weight.parameter is not None
        and node.operation.weight.parameter.name == name
    ]
    shard = shard_of(tensor)
    return bool(uses) and shard is not None and all(_is_whole(operation, shard) for operation in uses)


def _is_whole(operation: Weighted, shard: Shard) -> bool:
    weight: Weight = operation.weight
    assert weight.parameter is not None
    if weight.factors or weight.parameter.inverse:
        return False
    match operation:
        case Linear():
            return weight.parameter.views in ((), (Permute((1, 0)),))
        case Conv(groups=1):
            return not weight.parameter.views and shard.dim < 2
    return False


def own_ends(
    weight: Tensor, out: ExtendedFloat, into: ExtendedFloat, axis: int, outputs: int = 0
) -> tuple[ExtendedFloat, ExtendedFloat]:
    """What leaves the outputs and what arrives at the inputs of a weight, of those that this rank's part of
    it joins. ``axis`` is that of units, ``outputs`` the weight's axis of outputs."""
    shard = shard_of(weight)
    if shard is None:
        return out, into
    axis %= out.mantissa.dim()
    return (shard.of(out, axis), into) if shard.dim == outputs else (out, shard.of(into, axis))
