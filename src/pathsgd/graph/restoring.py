"""Leaves a model as it was before export: nothing of it may be different after a trace, failed or not."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd._torch import versions

_CONTAINERS = (OrderedDict, dict, list, set, deque, tuple, frozenset)
"""The first that a class derives from is the one that reads it: an OrderedDict keeps an order of its own."""
_NOT_OF_A_MODEL = (type, ModuleType, logging.Logger)
"""Classes of what a model refers to but the whole process shares, and export itself changes: it creates
loggers."""
_LOCKS = {type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event}
"""An object with one of these is for several threads, so a change in it need not be the forward's."""


@contextlib.contextmanager
def restore_modules(model: nn.Module) -> Iterator[None]:
    """Puts back what a forward pass under export writes to the modules and to the containers, the objects
    and the tensors that they hold (fake tensors, for one). What it did not write is not touched."""
    saved = _save_references(model)
    copies = _copy_values(model, (value for value, _, _ in saved))
    tensors = (*model.parameters(), *model.buffers(), *(tensor for tensor, *_ in copies))
    gradients = [(x, x.requires_grad, x.grad) for x in tensors if x.is_leaf]
    generators = [(value, value.get_state()) for value, _, _ in saved if type(value) is torch.Generator]
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            # It would look at addresses for cudnn, which tensors under export do not have.
            module.__dict__["flatten_parameters"] = lambda: None
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _restore_process():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for value, part, contents in saved:
            with contextlib.suppress(Exception):  # one that cannot be restored must not stop the others
                found = _read(value, part)
                if len(found) != len(contents) or not all(map(operator.is_, found, contents)):
                    _write(value, part, contents)
        for tensor, needed, gradient in gradients:
            if tensor.requires_grad != needed or tensor.grad is not gradient:
                tensor.requires_grad_(needed)
                tensor.grad = gradient
        for generator, state in generators:
            generator.set_state(state)
        for tensor, data, copy, version in copies:
            with contextlib.suppress(Exception), torch.no_grad():
                if tensor.device != data.device or versions([tensor]) != version:  # a fake one has none
                    tensor.data = data.copy_(copy)


@contextlib.contextmanager
def _restore_process() -> Iterator[None]:
    """Puts back what a forward pass may set for the whole process. Export draws no numbers of torch."""
    numpy = sys.modules.get("numpy")
    drawn, numpy_drawn = random.getstate(), numpy.random.get_state() if numpy is not None else None
    torch_drawn = torch.get_rng_state()
    dtype = torch.get_default_dtype()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kinds = ["cpu", *([device.type] if device else [])]
    cast = {kind: torch.is_autocast_enabled(kind) for kind in kinds}
    try:
        yield
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.random.set_state(numpy_drawn)
        torch.set_rng_state(torch_drawn)
        torch.set_default_dtype(dtype)
        for kind, enabled in cast.items():
            torch.set_autocast_enabled(kind, enabled)


def _save_references(model: nn.Module) -> list[tuple[Any, Any, list[Any]]]:
    """The contents, by reference, of each module and of the containers and objects to be reached from there:
    (value, part of it, contents)."""
    saved: list[tuple[Any, Any, list[Any]]] = []
    parts: Callable[[type], list[Any]] = functools.cache(_parts)
    modules = list(model.modules())
    attributes = {id(module.__dict__) for module in modules}
    seen: set[int] = set()
    queue: deque[Any] = deque(modules)
    # The nearest first. The limit is for a model that refers to a trainer or a dataset, at some microseconds
    # for each object; a module itself, with its dicts and parameters, counts for about 20.
    limit = 100_000 + 100 * len(modules)
    while queue and len(saved) < limit:
        value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for part in parts(type(value)):
            with contextlib.suppress(Exception):
                contents = _read(value, part)
                kinds = set(map(type, contents))
                if id(value) not in attributes and not kinds.isdisjoint(_LOCKS):
                    continue  # the queue of a logging client, for one
                saved.append((value, part, contents))
                if any(map(parts, kinds)):  # so that a long list of numbers is not walked through
                    queue.extend(x for x in contents if parts(type(x)))
    return saved


def _parts(kind: type) -> list[Any]:
    """The parts that the instances of a class are read by, without running code of its own: the builtin
    container that it derives from, and the descriptors of its ``__dict__`` and slots."""
    if issubclass(kind, _NOT_OF_A_MODEL):
        return []
    if kind is FunctionType:
        return [vars(kind)["__closure__"]]  # a hook may collect what it sees in a list outside of it
    if kind is CellType:
        return [vars(kind)["cell_contents"]]
    if kind in _CONTAINERS:
        return [kind]  # an OrderedDict has a __dict__, too, which nobody uses; a module has ten of these
    parts: list[Any] = [container for container in _CONTAINERS if issubclass(kind, container)][:1]
    for base in kind.__mro__:
        for name, entry in vars(base).items():
            is_slot = type(entry) is MemberDescriptorType
            if is_slot or (name == "__dict__" and type(entry) is GetSetDescriptorType):
                parts.append(entry)
    return parts


def _read(value: Any, part: Any) -> list[Any]:
    """The contents of one part of a value, by reference and in their order; of a dict the keys, then the
    values."""
    if part is dict or part is OrderedDict:
        return [*part.keys(value), *part.values(value)]
    if part in _CONTAINERS:
        return list(part.__iter__(value))
    try:
        return [part.__get__(value)]
    except (AttributeError, ValueError):
        return []  # a slot, or a variable, without a value


def _write(value: Any, part: Any, contents: list[Any]) -> None:
    """Writes what ``_read`` returned. A read-only subclass overrides the methods of its instances; the
    methods of the builtin class still write."""
    if part not in _CONTAINERS:
        part.__set__(value, contents[0]) if contents else part.__delete__(value)
        return
    part.clear(value)
    if part is dict or part is OrderedDict:
        half = len(contents) // 2
        for key, item in zip(contents[:half], contents[half:], strict=True):
            part.__setitem__(value, key, item)
    else:
        (part.update if part is set else part.extend)(value, contents)


def _copy_values(model: nn.Module, values: Iterable[Any]) -> list[tuple[Tensor, Tensor, Tensor, Any]]:
    """Copies of the tensors that are neither parameters nor buffers: (tensor, its data, copy, version).

    Export replaces parameters and buffers by fake tensors, but writes in place to a tensor in a plain
    attribute or a list.
    """
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    copies = []
    left = 2**28  # bytes: a model may refer to its dataset, which is not to be copied
    for value in values:
        if type(value) not in (Tensor, nn.Parameter) or id(value) in registered:
            continue
        with contextlib.suppress(Exception), torch.no_grad():  # a sparse tensor has no address
            # fully_shard frees the memory of a whole parameter, but keeps the tensor: to read it crashes
            if value.nbytes <= left and (value.untyped_storage().nbytes() or not value.nbytes):
                copies.append((value, value.data, value.data.clone(), versions([value])))
                left -= value.nbytes
    return copies
