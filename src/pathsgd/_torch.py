"""Every private name of torch that this library uses, with the reason; tried with torch 2.6 and 2.13.

The rest of the library imports these from here, so that a new torch breaks one file. A test finds strays.
torch.export, which takes seconds to import, is imported by what first traces a model.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Structures of inputs: torch.utils.pytree, the public name, is still experimental.
tree_map: Callable[..., Any] = _pytree.tree_map
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves


ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""Its name since torch 2.13, and before."""


def all_gather(output: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    """The tensors of all ranks one after the other. A collective call."""
    getattr(dist, ALL_GATHER)(output, own, group=group)


def foreach(operation: str, tensors: Sequence[Tensor], *others: Any, **options: Any) -> Any:
    """``torch._foreach_<operation>``: one launch for many tensors, as in torch.optim's multi-tensor forms."""
    return getattr(torch, f"_foreach_{operation}")(tensors, *others, **options)


_uncompiled: list[Callable[[], None]] = []
"""Functions to call once torch.compile has been imported."""

F = TypeVar("F", bound=Callable[..., Any])


def keep_uncompiled(function: F) -> F:
    """``torch.compiler.disable``, which imports torch.compile: that takes seconds, so it is done when tracing
    a model has imported it."""
    called: Callable[..., Any] = function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    def disable() -> None:
        nonlocal called
        called = torch.compiler.disable(function)
        torch._dynamo.decorators.skip(call)  # or a frame of its own would be compiled for it

    _uncompiled.append(disable)
    return call  # type: ignore[return-value]


def finish_uncompiled() -> None:
    """Keeps torch.compile from functions that were marked so."""
    while _uncompiled:
        _uncompiled.pop()()


def is_compiling() -> bool:
    """Whether this very code is being traced by torch.compile.

    ``torch.compiler.is_compiling()`` will not do: it is also true in every other thread while one thread runs
    ``torch.export.export``.
    """
    return torch.compiler.is_dynamo_compiling()


def is_capturing() -> bool:
    """Whether this step is being compiled or captured in a CUDA graph, so that no value can be looked at."""
    return is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def is_transforming() -> bool:
    """Whether this is inside of a transform of torch.func, so that any tensor may be transformed."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def local_tensor(tensor: DTensor) -> Tensor:
    """The part of a DTensor that a rank holds. ``to_local()`` makes a view of it each time, for autograd."""
    local = tensor._local_tensor
    return local if type(local) is Tensor else tensor.to_local()


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing differentiates, traces or transforms any of them. Inside of
    ``torch.autograd.forward_ad.dual_level()`` any may have a tangent, whatever ``requires_grad`` says."""
    if is_compiling() or is_transforming() or forward_ad._current_level >= 0:
        return False
    return not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors)


def is_about_values(error: Exception) -> bool:
    """Whether a size or a branch under export depends on values."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, GuardOnDataDependentSymNode)


Version = tuple[int, int]


def versions(tensors: Iterable[Tensor]) -> list[Version]:
    """The address of each tensor and how often torch has written it. A write through ``.data``, numpy or a
    fused CPU optimizer is not counted: after one, call the optimizer's ``refresh()``."""
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside the wrapper of torch.compile, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def module_dicts(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The dicts in which a module keeps its children, its parameters and its buffers."""
    return module._modules, module._parameters, module._buffers


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks before and after a module's forward pass."""
    return module._forward_pre_hooks, module._forward_hooks


def operator_schema(target: object) -> Any:
    """The schema of an ATen operator in an exported program; None for anything else."""
    return getattr(target, "_schema", None)


def without_values(tensor: Tensor) -> Tensor:
    """A tensor, or a Parameter, of the same shape, dtype and device that has no memory, for torch.export."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def load_state_dict_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """The pre- and post-hooks that users registered on an optimizer's load_state_dict."""
    return (
        list(optimizer._optimizer_load_state_dict_pre_hooks.values()),
        list(optimizer._optimizer_load_state_dict_post_hooks.values()),
    )


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Turns cudnn off for the whole process, for a moment."""
    enabled = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(enabled)


_exporting = threading.RLock()
LONGEST_WAIT = 600.0
"""Seconds for which a trace waits for exports and compilations of other threads."""


@functools.cache
def _export_one_at_a_time() -> None:
    """For good: put back and set again, it would be missed by an export that begins in between."""
    from torch.export import _trace

    original = _trace._export

    @functools.wraps(original)
    def wait_and_export(*args: Any, **kwargs: Any) -> Any:
        with _exporting:
            return original(*args, **kwargs)

    cast(Any, _trace)._export = wait_and_export


@contextmanager
def export_alone() -> Iterator[list[int]]:
    """Keeps torch.export apart from other threads: its modes, what it patches and its flags belong to the
    process, so two at a time fail, lose operators or the names of modules, and leave flags wrong for good.

    An export or a compilation that another thread is in is waited for; one that begins meanwhile waits for
    this one. What else begins to trace (make_fx, torch.fx) is not kept out, but seen: its threads are in the
    list. What of that began before is not seen.

    Raises:
        TimeoutError: another thread does not leave torch.export or torch.compile.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch.export import _trace
    from torch.fx import _symbolic_trace

    here, seen, fx = threading.get_ident(), list[int](), cast(Any, _symbolic_trace)
    _export_one_at_a_time()
    latest = time.monotonic() + LONGEST_WAIT
    if not _exporting.acquire(timeout=LONGEST_WAIT):
        raise TimeoutError
    new_patcher = fx._new_patcher

    @functools.wraps(new_patcher)
    def see_and_patch() -> Any:
        if threading.get_ident() != here:
            seen.append(threading.get_ident())
        elif fx._is_fx_tracing_flag is True:  # upon which a compiled model raises, in any thread
            fx._is_fx_tracing_flag = _InThread(here)
        return new_patcher()

    fx._new_patcher = see_and_patch
    try:
        # Exports that began before the first trace. The lock is taken last, as they may want it, too.
        while _trace._EXPORT_MODULE_HIERARCHY is not None or not compile_lock.acquire(timeout=0.01):
            if time.monotonic() > latest:
                raise TimeoutError
            time.sleep(0.001)
        try:
            seen.clear()
            yield seen
        finally:
            compile_lock.release()
    finally:
        fx._new_patcher = new_patcher
        _exporting.release()


@contextmanager
def export_in_this_thread_only() -> Iterator[None]:
    """Keeps torch.export from changing what other threads compute while it runs.

    It turns mkldnn, nnpack and cudnn off for the whole process, and makes ``torch.compiler.is_compiling()``
    true in every thread, upon which torch's own Adam computes its bias correction in another precision: a
    training in another thread would round differently. Inside, backends stay as they are and the flags are
    true in this thread alone; with torch 2.6, where nothing outside of export can replace the function that
    sets them, in every thread. To be entered inside :func:`export_alone`.
    """
    from torch.export import _trace

    export: Any = _trace
    originals = export._ignore_backend_decomps, getattr(export, "_compiling_state_context", None)
    here = _InThread(threading.get_ident())

    @contextmanager
    def compile_here() -> Iterator[None]:
        flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
        torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = here  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags

    export._ignore_backend_decomps, export._compiling_state_context = nullcontext, compile_here
    try:
        yield
    finally:
        export._ignore_backend_decomps, export._compiling_state_context = originals


class _InThread:
    """True in one thread."""

    def __init__(self, thread: int) -> None:
        self.thread = thread

    def __bool__(self) -> bool:
        return threading.get_ident() == self.thread

    # Models reckon with ``torch.compiler.is_exporting()`` as with any bool.

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    __rand__, __ror__ = __and__, __or__
    __hash__ = None  # type: ignore[assignment]
