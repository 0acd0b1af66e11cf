"""Ranks that train copies of one model: running statistics enter gamma as rank 0 holds them.

gamma is computed from the weights, which are the same on all ranks, and from the buffers on paths: the
running statistics of a batch norm, which are of each rank's own batches. With a gamma of its own every rank
would move its weights in its own way, and the copies would drift apart. So before a step they are taken from
rank 0, whose buffers are those that DistributedDataParallel keeps: one broadcast of all of them together.

A collective call must be made by all ranks in the same order. So it depends on nothing but the calls of
``step`` and ``clip_path_grad_norm_``: not on what is cached, not on modes, not on which rank looks at gamma.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from pathsgd import _torch
from pathsgd.errors import PathError
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.graph.path_graph import PathGraph, compute_dtype
from pathsgd.graph.sharded import is_sharded
from pathsgd.optim.lazy_graph import depth_of_caller
from pathsgd.optim.weak_hook import WeakHook


class Replicas:
    """The ranks that hold copies of a model, and rank 0's running statistics.

    Args:
        model: the module, or DistributedDataParallel of it. For the module alone, a hook finds out in its
            forward pass whether it is inside one.
        inner: the module itself.
    """

    def __init__(self, model: nn.Module, inner: nn.Module) -> None:
        self.inner = inner
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._handle: RemovableHandle | None = None
        self._warned = False
        self._statistics: Tensor | None = None
        self._names: list[str] | None = None
        found = _find_ddp(model)
        if found is not None:
            self.remember(found)
        else:
            self._watch()

    def remember(self, ddp: DistributedDataParallel) -> None:
        """The module is trained inside this one."""
        self._ddp = weakref.ref(ddp)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _watch(self) -> None:
        if self._handle is None and _world_size() > 1:
            self._handle = self.inner.register_forward_pre_hook(_Finder(self))

    def group(self) -> dist.ProcessGroup | None:
        """The ranks that have copies; None if there is no other."""
        if _world_size() == 1:
            return None
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None and any(map(is_sharded, self.inner.parameters())):
            return _mesh_group(self.inner)
        if ddp is None:
            self._watch()
            return None
        if _torch.is_joining(ddp):
            raise PathError(
                "every step takes the running statistics of batch norms from rank 0, and inside Join a rank "
                "may have come to its end before that: give all ranks as many batches, or take relative "
                "steps (PathMuon, PathAdam), which do not need the statistics"
            )
        return ddp.process_group if dist.get_world_size(ddp.process_group) > 1 else None

    def synchronise(self, graph: PathGraph) -> bool:
        """Takes the running statistics that enter gamma from rank 0; whether there are any, and other ranks.

        A collective call.
        """
        if _world_size() == 1:
            self._statistics = None
            return False
        if self._names is None:
            self._names = find_statistics(graph, self.inner)
        if not self._names:
            return False
        group = self.group()
        if group is None:
            self._statistics = None
            self._warn()
            return False
        self._receive(self._names, group)
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _receive(self, names: list[str], group: dist.ProcessGroup) -> None:
        buffers = dict(self.inner.named_buffers(remove_duplicate=False))
        dtype = compute_dtype({name: buffers[name] for name in names})
        own = [buffers[name].detach().to(dtype).flatten() for name in names]
        count, device = sum(map(len, own)), own[0].device
        kept = self._statistics
        if kept is None or (len(kept), kept.dtype, kept.device) != (count, dtype, device):
            # Kept in one place, where a CUDA graph of gamma reads them.
            kept = self._statistics = torch.empty(count, dtype=dtype, device=device)
        torch.cat(own, out=kept)
        dist.broadcast(kept, group=group, group_src=0)

    def take_statistics(self, tensors: Tensors) -> Tensors:
        """The tensors of the model with the statistics last received in place of this rank's own."""
        if self._statistics is None or self._names is None:
            return tensors
        names = self._names
        parts = self._statistics.split([tensors[name].numel() for name in names])
        received = {n: part.view(tensors[n].shape) for n, part in zip(names, parts, strict=True)}
        return {**tensors, **received}

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"torch.distributed has {_world_size()} ranks, but this model was not run inside "
                "DistributedDataParallel, so that gamma is taken from this rank's own batch norm statistics. "
                "That is right if ranks train models of their own. If they train copies of one, these will "
                "drift apart: use DistributedDataParallel, or broadcast the buffers before every step",
                stacklevel=depth_of_caller(),
            )

    def __getstate__(self) -> dict[str, Any]:
        # A copy is of the module alone: what it is trained inside is seen when it is.
        return {**self.__dict__, "_ddp": None, "_handle": None, "_statistics": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()


def find_statistics(graph: PathGraph, model: nn.Module) -> list[str]:
    """The buffers on paths that may change from batch to batch: of floats, with one axis or none.

    Larger ones, such as masks of pruned weights, are taken to be the same on all ranks.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    used = {stored.name for _, weight in graph.weights() for stored in weight.factors}
    return [
        name
        for name, buffer in buffers.items()
        if name in used and buffer.is_floating_point() and buffer.dim() <= 1
    ]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _mesh_group(model: nn.Module) -> dist.ProcessGroup:
    """The ranks over which a model is sharded or replicated."""
    mesh: Any = next(p.device_mesh for p in model.parameters() if is_sharded(p))
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() != _world_size():
        raise PathError(
            "batch norm of a model that is sharded over several axes of a device mesh is supported where the "
            f"mesh has all ranks; it has {mesh.size()} of {_world_size()}"
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The outermost DistributedDataParallel among the wrappers around a module."""
    while not isinstance(model, DistributedDataParallel):
        inner = model.module if isinstance(model, nn.DataParallel) else _torch.uncompiled(model)
        if inner is model:
            return None
        model = inner
    return model


class _Finder(WeakHook):
    def tell(self, owner: Replicas, *_: Any) -> None:
        ddp = _torch.active_ddp()
        if ddp is not None:
            owner.remember(ddp)
