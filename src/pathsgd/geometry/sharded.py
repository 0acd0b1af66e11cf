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
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pathsgd.geometry.scaled import Arithmetic, Scaled
from pathsgd.graph.edge_weights import Tensors
from pathsgd.graph.nodes import Conv, Linear, Permute, Weighted
from pathsgd.graph.path_graph import PathGraph
from pathsgd.sharding import Shard, gather_parts, is_sharded, local_part, shards_of


def compute_on_shards(
    compute: Callable[[Scaled, Tensor], Scaled],
    arithmetic: Arithmetic,
    x: Scaled,
    weight: Tensor,
    channels: int,
    outputs: int,
    inputs: int,
) -> Scaled:
    """``compute`` on the local part of a weight, made that of the whole: ``channels`` is the axis of units,
    ``outputs`` and ``inputs`` those of the weight. A collective call."""
    shards, local = shards_of(weight), local_part(weight)
    channels %= x.mantissa.dim()
    if shards and 0 in local.shape:
        # There are more ranks than rows. One that counts for nothing keeps all shapes as they are elsewhere.
        local = local.new_zeros([max(n, 1) for n in local.shape])

    def run(x: Scaled, shards: Sequence[Shard]) -> Scaled:
        if not shards:
            return compute(x, local)
        shard, *inner = shards
        if shard.dim == outputs:
            y = run(x, inner)
            y = y if shard.length else Scaled(y.mantissa.narrow(channels, 0, 0), y.exponent)
            mantissa, exponent = _use_one_exponent(arithmetic, y, shard.group)
            (whole,) = gather_parts([(shard, mantissa, channels)])
            return arithmetic.center(Scaled(whole, exponent))
        assert shard.dim == inputs
        part = shard.of(x.mantissa, channels) if shard.length else x.mantissa.narrow(channels, 0, 1)
        return _add_over_ranks(arithmetic, run(Scaled(part, x.exponent), inner), shard.group)

    return run(x, shards)


def _use_one_exponent(arithmetic: Arithmetic, x: Scaled, group: dist.ProcessGroup) -> Scaled:
    """Returns the numbers of x with the largest exponent of all ranks."""
    highest = x.exponent.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return Scaled(arithmetic.shift(x.mantissa, x.exponent - highest), highest)


def _add_over_ranks(arithmetic: Arithmetic, x: Scaled, group: dist.ProcessGroup) -> Scaled:
    """The sum (or the maximum) over ranks."""
    mantissa, exponent = _use_one_exponent(arithmetic, x, group)
    total = mantissa.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(arithmetic.p) else dist.ReduceOp.SUM, group=group)
    return arithmetic.center(Scaled(total, exponent))


def take_held_ends(
    weight: Tensor, out: Scaled, into: Scaled, axis: int, outputs: int = 0
) -> tuple[Scaled, Scaled]:
    """Returns what leaves the outputs and what arrives at the inputs of a weight, of those that this rank's
    part of it joins. ``axis`` is that of units, ``outputs`` the weight's axis of outputs."""
    axis %= out.mantissa.dim()
    for shard in shards_of(weight):
        if shard.dim == outputs:
            out = Scaled(shard.of(out.mantissa, axis), out.exponent)
        else:
            into = Scaled(shard.of(into.mantissa, axis), into.exponent)
    return out, into


# Vectors


def gather_vectors(graph: PathGraph, tensors: Tensors) -> Tensors:
    """The tensors in which sharded ones are whole, except the matrices and kernels that the rules above are
    for. A collective call, one for each dtype and each axis of the device mesh."""
    sharded = {name for name, tensor in tensors.items() if is_sharded(tensor) and name in graph.parameters}
    if not sharded:
        return tensors
    stays: dict[str, bool] = {}
    for operation in (node.operation for node in graph.nodes):
        if isinstance(operation, Weighted) and operation.weight.parameter is not None:
            name = operation.weight.parameter.name
            if name in sharded:
                stays[name] = stays.get(name, True) and _is_whole(operation, shards_of(tensors[name]))
    gathered = {name for name in sharded if not stays.get(name)}
    parts = {name: local_part(t) if name in gathered else t for name, t in tensors.items()}
    left = {name: list(shards_of(tensor)) for name, tensor in tensors.items() if name in gathered}
    while any(left.values()):  # from the last cut to the first
        buckets: dict[tuple[dist.ProcessGroup, torch.dtype], dict[str, Shard]] = {}
        for name, shards in left.items():
            if shards:
                shard = shards.pop()
                buckets.setdefault((shard.group, parts[name].dtype), {})[name] = shard
        for bucket in buckets.values():
            own = [(shard, parts[name].detach(), shard.dim) for name, shard in bucket.items()]
            parts.update(zip(bucket, gather_parts(own), strict=True))
    return parts


def _is_whole(operation: Weighted, shards: Sequence[Shard]) -> bool:
    """Whether it uses a sharded parameter as the whole matrix of a linear layer, or its transpose, or as the
    kernel of a convolution without groups."""
    weight = operation.weight
    assert weight.parameter is not None
    if not shards or weight.factors or weight.parameter.shift:
        return False
    match operation:
        case Linear():
            return weight.parameter.views in ((), (Permute((1, 0)),))
        case Conv(groups=1):
            return not weight.parameter.views and all(shard.dim < 2 for shard in shards)
    return False
