"""Which module was called with what in one run of a model, which operators it ran, and what would make a
trace of that call alone differ from what it did in the run."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pathsgd._torch import TorchDispatchMode, tree_leaves, tree_map
from pathsgd.graph.export import memory_of, tensors_in, written_arguments

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice)


@dataclass(frozen=True)
class Shaped:
    """A tensor that a module was given, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Opaque:
    """An object that a module was given and torch does not know, such as a cache, as it was then."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return type(self.value).__qualname__


@dataclass(eq=False)
class Call:
    """One call of a module."""

    module: nn.Module
    parent: Call | None
    given: Any = None
    """Its arguments, tensors as :class:`Shaped`."""
    problem: str = ""
    """Why a trace of it alone would not be what it did."""
    events: list[Any] = field(default_factory=list)
    """What it ran, in order: operators with the parameters they read, and calls of other modules."""
    inputs: set[StorageWeakRef] = field(default_factory=set)
    writable: list[StorageWeakRef] = field(default_factory=list)
    """The memory of the tensors it was given as they are, not inside an object."""
    outputs: set[StorageWeakRef] = field(default_factory=set)
    running: bool = True

    def operators(self) -> Iterator[tuple[str, tuple[StorageWeakRef, ...]]]:
        """The operators that it ran with the numbers they were given, also in the calls it made, and the
        memory of parameters they read."""
        for event in self.events:
            if isinstance(event, Call):
                yield from event.operators()
            else:
                yield event

    def children(self) -> list[Call]:
        """The calls it made."""
        return [event for event in self.events if isinstance(event, Call)]

    def refuse(self, problem: str) -> None:
        self.problem = self.problem or problem


def _chain(call: Call | None) -> Iterator[Call]:
    """The call, then those it was made in."""
    while call is not None:
        yield call
        call = call.parent


class Recorder(TorchDispatchMode):
    """Watches a run of a model. Memory tells tensors apart, so views are seen as well."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.calls: list[Call] = []
        """Those of the model itself."""
        self.current: Call | None = None
        self.parameters: dict[StorageWeakRef, list[nn.Parameter]] = {}
        """By memory: the weights of a recurrent layer share theirs on a GPU."""
        for p in model.parameters():
            self.parameters.setdefault(memory_of(p), []).append(p)
        self.buffers = {memory_of(b): b for b in model.buffers() if b.layout == torch.strided}
        self.made: dict[StorageWeakRef, Call | None] = {}
        """By memory, the call that made it; None for the inputs of the model."""
        self.variable: set[StorageWeakRef] = set()
        """Memory whose values depend on inputs or parameters."""
        self.read: set[StorageWeakRef] = set()
        """The parameters that were read."""
        self.outside: set[StorageWeakRef] = set()
        """Those that were read in no call."""
        self.written: dict[StorageWeakRef, tuple[Any, Any]] = {}
        """Memory that is older than the run, with a copy made before something wrote to it."""
        self.watching = True

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self  # a copied weak reference to memory would free it twice

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model without gradients, and puts the memory back that it wrote. The hooks are left to
        ``restore_modules``."""
        data = [(tensor, tensor.data) for tensor in self.model.parameters()]
        self.variable.update(map(memory_of, tensors_in((args, kwargs))))
        self.made.update(dict.fromkeys(self.variable))
        try:
            for module in self.model.modules():
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
                module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
            with torch.no_grad(), self:
                result = self.model(*args, **kwargs)
            self.outside |= self.parameters.keys() & set(map(memory_of, tensors_in(result)))
            return result
        finally:
            for tensor, own in data:
                if tensor.data_ptr() != own.data_ptr():
                    tensor.data = own
            for storage, before in self.written.values():
                storage.copy_(before)

    # Modules

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(module, self.current)
        leaves = tensors_in((args, kwargs))
        call.inputs = set(map(memory_of, leaves))
        call.writable = list(map(memory_of, tensors_of((args, kwargs))))
        self._look_at(leaves)
        if any(memory in self.parameters for memory in call.inputs):
            call.refuse("it is given a parameter")
        self.watching = False
        try:
            call.given = tree_map(_describe, (args, kwargs))
        except Exception:
            call.refuse("it is given an object that cannot be copied")
        finally:
            self.watching = True
        (self.calls if self.current is None else self.current.events).append(call)
        self.current = call

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        call = self.current
        assert call is not None
        left = tensors_in((result, [x for x in tree_leaves((args, kwargs)) if not isinstance(x, Tensor)]))
        call.outputs = {memory_of(x) for x in left}
        call.running = False
        self.current = call.parent
        self._look_at(left)

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.watching:
            return func(*args, **kwargs)
        read = tensors_of((args, kwargs))
        self._look_at(read)
        memory = [memory_of(x) for x in read]
        weights = tuple(m for m in memory if m in self.parameters)
        self.read.update(weights)
        if self.current is not None:
            numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, (int, float, complex))]
            self.current.events.append((f"{func} {numbers}", weights))
        else:
            self.outside.update(weights)
        written = self._look_at_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        returned = set(map(memory_of, tensors_of(result)))
        for m in returned - self.parameters.keys() - self.buffers.keys() - set(memory):
            self.made[m] = self.current
        if weights or not self.variable.isdisjoint(memory):
            self.variable |= (returned | written) - self.parameters.keys() - self.buffers.keys()
        return result

    def _look_at(self, tensors: Iterable[Tensor]) -> None:
        """The running calls read these."""
        for memory in self.variable.intersection(map(memory_of, tensors)):
            made_in = set(_chain(self.made.get(memory)))
            for call in made_in:
                if not call.running and memory not in call.outputs:
                    call.refuse("a value inside it is read elsewhere")
            for call in _chain(self.current):
                if call not in made_in and memory not in call.inputs:
                    call.refuse("it reads a value that it is not given")

    def _look_at_writes(self, func: Any, args: Any, kwargs: Any) -> set[StorageWeakRef]:
        """Refuses calls that write to what is not theirs, and returns what is written."""
        found: set[StorageWeakRef] = set()
        for x in tensors_of(written_arguments(func, args, kwargs)):
            found.add(memory := memory_of(x))
            if self.made.get(memory) is None and memory not in self.written:
                self.written[memory] = x.untyped_storage(), x.untyped_storage().clone()
        for memory in found:
            buffer, made_in = self.buffers.get(memory), set(_chain(self.made.get(memory)))
            for call in _chain(self.current):
                own = call in made_in or any(buffer is x for x in call.module.buffers())
                if not own and call.writable.count(memory) != 1:
                    call.refuse("it writes in place to what is not its own")
        return found


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a structure that torch knows, without those inside other objects."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shaped(tuple(value.shape), value.dtype, value.device)
    if isinstance(value, PLAIN):
        return value
    if callable(value):
        raise TypeError
    return Opaque(copy.deepcopy(value))
