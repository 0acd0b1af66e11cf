"""torch.export at batch one, with the model left as it was and errors that say what to do."""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from pathsgd._torch import (
    export_in_this_thread_only,
    operator_schema,
    tree_leaves,
    tree_map,
    without_cudnn,
)
from pathsgd.errors import DataDependentError, TraceError
from pathsgd.graph.restoring import restore_modules
from pathsgd.graph.rules import RULES

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def export_at_batch_one(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int | None
) -> tuple[ExportedProgram, list[str]]:
    """The exported program, and what a reader of the report should know about it."""
    _check_example((args, kwargs), batch_dim)
    examples = examples_for(model, args, kwargs)
    errors = []
    for args, kwargs in examples:
        try:
            return _at_batch_one(model, args, kwargs, batch_dim)
        except TraceError as error:
            errors.append(error)
    # Some models branch at random in training mode (stochastic depth), which export cannot follow.
    training = [module for module in model.modules() if module.training]
    with restore_modules(model):
        for module in training:
            module.training = False
        for args, kwargs in examples if training else ():
            with contextlib.suppress(TraceError):
                program, notes = _at_batch_one(model, args, kwargs, batch_dim)
                note = "it could not be traced in training mode, so this is what it computes in eval mode"
                return program, [note, *notes]
    raise errors[-1]  # an earlier one may be about nothing but precision


def examples_for(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The inputs as the model may take them, to be tried one after the other. Only shapes matter, so an
    example on another device is moved."""
    device = next(model.parameters()).device
    inputs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, (args, kwargs))
    return [inputs, *_in_precision_of(model, inputs)]


def _at_batch_one(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int | None
) -> tuple[ExportedProgram, list[str]]:
    cut = _cut_batch((args, kwargs), batch_dim)
    if cut is None:
        return _export(model, args, kwargs), []
    one, options = cut
    try:
        # Made functional only when that is known: it takes several times as long as the export.
        program = _export(model, one, options, functional=False)
        if _depends_on_size(program, model, _cut_batch((args, kwargs), batch_dim, to=2)):
            note = (
                f"what the model computes depends on the size of axis {batch_dim}, so it is no batch axis "
                "and all of it counts; pass batch_dim to name the batch, or batch_dim=None"
            )
            return _export(model, args, kwargs), [note]
        program = _export(model, one, options) if _mutates(program) else program
        return program, _time_first(model) if batch_dim == 0 else []
    except DataDependentError:
        raise  # as it would be at any size
    except TraceError:
        pass
    # Perhaps the model fixes its batch size, or the example has no batch axis at all.
    note = (
        f"axis {batch_dim} of the example could not be cut to one entry, so all of it counts as "
        "positions; if it is no batch axis, pass batch_dim=None"
    )
    return _export(model, args, kwargs), [note]


def _check_example(inputs: Any, batch_dim: int | None) -> None:
    leaves = tree_leaves(inputs)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not tensors:
        kind = type(leaves[0]).__name__ if leaves else "nothing"
        hint = "pass torch.empty(*shape)" if kind == "int" else "make it a tensor, as torch.from_numpy does"
        if leaves and hasattr(leaves[0], "__iter__") and not hasattr(leaves[0], "__array__"):
            hint = "of a DataLoader pass the inputs of one batch, as x of x, y = next(iter(loader))"
        raise TraceError(f"example_input must hold a tensor, got {kind}: {hint}")
    if batch_dim is not None and (batch_dim < 0 or all(x.dim() <= batch_dim for x in tensors)):
        shapes = [tuple(x.shape) for x in tensors]
        raise TraceError(
            f"no input has an axis batch_dim={batch_dim!r} (shapes {shapes}); name one, or pass None"
        )


def _in_precision_of(model: nn.Module, inputs: Any) -> list[Any]:
    """The example in the precision of the model's first parameter; nothing if it is in that already.

    To be tried only after the example as it is: a model may cast its inputs by itself.
    """
    floats = (p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1)
    dtype = next(floats, None)  # of 8 bits are quantised weights, which no input goes into as it is

    def differs(x: Any) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype

    if dtype is None or not any(map(differs, tree_leaves(inputs))):
        return []
    return [tree_map(lambda x: x.to(dtype) if differs(x) else x, inputs)]


def _time_first(model: nn.Module) -> list[str]:
    """A note if axis 0, which was taken for the batch, may be time. Only the user can know."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
            return [
                f"{name!r} ({type(module).__name__}) takes time first, and axis 0 of the example was taken "
                "for the batch; if it is time, pass batch_dim=1"
            ]
    return []


def _depends_on_size(program: ExportedProgram, model: nn.Module, inputs: Any) -> bool:
    """Whether a batch of two runs other operators than a batch of one: a loop over the axis, a branch."""
    try:
        args, kwargs = inputs
        other = _export(model, args, kwargs, functional=False)
    except TraceError:
        return False  # two is a size the example does not have; one was fine

    def calls(exported: ExportedProgram) -> list[Any]:
        called = []
        for node in exported.graph.nodes:
            rule = RULES.get(str(node.target).removeprefix("aten.").split(".")[0])
            # An axis of size one needs fewer copies and views than one of size two.
            moves = node.target is operator.getitem or (rule is not None and rule.moves)
            if node.op == "call_function" and not moves:
                steps = None
                if "rnn_" in str(node.target):
                    # One operator for all time steps: their number must not be what was cut.
                    shape = node.args[0].meta["val"].shape
                    steps = shape[1 if node.args[-1] is True and len(shape) == 3 else 0]
                called.append((str(node.target), steps))
        return called

    return calls(program) != calls(other)


def _cut_batch(inputs: Any, batch_dim: int | None, to: int = 1) -> Any | None:
    """The inputs at batch one; None if they are already."""
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    if batch_dim is None or not tensors or tensors[0].dim() <= batch_dim:
        return None
    size = tensors[0].shape[batch_dim]
    if size == 1:
        return None

    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() <= batch_dim or x.shape[batch_dim] != size:
            return x
        shape = list(x.shape)
        shape[batch_dim] = to
        return x.narrow(batch_dim, 0, to) if size >= to else x.new_zeros(shape)

    return tree_map(cut, inputs)


CACHES = ("past_key_values", "cache_params")
"""What models of transformers return for the next token with ``use_cache``, their default. No loss reads it,
so it fixes no units: steps would depend on that option."""


class _TensorsOnly(nn.Module):
    """The model with what else it returns (a cache, a plain object) left out: export would refuse it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        result = self.model(*args, **kwargs)
        if isinstance(result, Mapping):
            result = {key: value for key, value in result.items() if key not in CACHES}
        return tensors_in(result)


def tensors_in(value: Any, depth: int = 8) -> list[Tensor]:
    """Every tensor in a structure, also inside objects that torch does not know."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or value is None or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return []
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = value
    else:
        slots = [getattr(value, name, None) for name in getattr(value, "__slots__", ())]
        items = [*slots, *(vars(value).values() if hasattr(value, "__dict__") else ())]
    return [x for item in items for x in tensors_in(item, depth - 1)]


def own_name(name: str) -> str:
    """A name in the exported program as the model itself has it."""
    return name.removeprefix("model.") if name != "model" else ""


RECURRENT = ("rnn_relu", "rnn_tanh", "lstm", "gru")


class _PlainLayers(TorchFunctionMode):
    """Batch norm by its running statistics, also in training mode: batch one has no others. And recurrent
    layers without cudnn, which export would otherwise write in its place."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is nn.functional.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        is_recurrent = getattr(func, "__name__", "") in RECURRENT
        with without_cudnn() if is_recurrent else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))

    @staticmethod
    def _batch_norm(
        input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
        weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        from_batch = training and running_mean is None
        return torch.batch_norm(
            input, weight, bias, running_mean, running_var, from_batch, momentum, eps, False
        )


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], functional: bool = True
) -> ExportedProgram:
    """The exported program, with what it writes in place written out if it is to be ``functional``."""
    try:
        with (
            restore_modules(model),
            _PlainLayers(),
            export_in_this_thread_only(),
            silence_torch(),
            torch.no_grad(),  # flex attention has no backward pass on a CPU
        ):
            program = torch.export.export(_TensorsOnly(model), args, kwargs, strict=False)
            if functional and _mutates(program):
                program = program.run_decompositions({})
    except Exception as error:
        explained = _explain(model, error, args, kwargs)
    else:
        return program
    # The message has what matters; the chain of torch's own tracebacks is hundreds of lines.
    raise explained


@contextlib.contextmanager
def silence_torch() -> Iterator[None]:
    """Suppresses the warnings, the error log and the printed graphs of export: what matters is raised."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _mutates(program: ExportedProgram) -> bool:
    """Whether anything is written in place that the program must be made functional for: not a counter (of a
    batch norm), nor memory that nothing else has read before, as by an in-place ReLU."""
    read: set[StorageWeakRef] = set()
    for node in program.graph.nodes:
        for value in _values(written_arguments(node.target, node.args, node.kwargs)):
            is_counter = value.dim() == 0 and not value.is_floating_point()
            if memory_of(value) in read and not is_counter:
                return True
        if node.op == "placeholder" or len(node.users) > 1:
            read.update(map(memory_of, _values(node)))
    return False


def _values(arguments: Any) -> list[Tensor]:
    """The fake tensors that nodes stand for, if they have memory."""
    found = [x.meta.get("val") for x in tree_leaves(arguments) if isinstance(x, fx.Node)]
    return [x for x in tree_leaves(found) if isinstance(x, Tensor) and _has_memory(x)]


def _has_memory(tensor: Tensor) -> bool:
    """Whether it is neither sparse nor one of many inside torch.vmap."""
    try:
        return tensor.untyped_storage() is not None
    except NotImplementedError:
        return False


def written_arguments(target: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a call of an ATen operator writes to; ``detach_`` changes no number."""
    schema = operator_schema(target)
    if schema is None or not schema.is_mutable or schema.name == "aten::detach_":
        return []
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    return [given.get(argument.name) for argument in schema.arguments if argument.is_write]


def memory_of(tensor: Tensor) -> StorageWeakRef:
    """Equal for all views of one memory, and for nothing else while it is kept."""
    return StorageWeakRef(tensor.untyped_storage())


def _explain(model: nn.Module, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TraceError:
    """A TraceError that names the module in which export failed, and says what to do."""
    names = {module: name for name, module in model.named_modules()}
    where, module = type(model).__name__, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        inner = frame.f_locals.get("self")
        if isinstance(inner, nn.Module) and names.get(inner):
            where, module = f"{names[inner]!r} ({type(inner).__name__})", inner
    shapes = [tuple(x.shape) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    message = str(error).strip().splitlines() or [type(error).__name__]
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        explained = explain_values(where, message[0])
        explained.module = module
        return explained
    advice = f"check that example_input {shapes} is what the model's forward takes"
    if kwargs and not args:
        advice += "; a dict is taken as keyword inputs: for a model that takes one dict, pass (that dict,)"
    if "inside of vmap" in message[0] and torch.__version__ < "2.11":
        advice = (
            f"torch.vmap and flex attention need torch 2.11 or newer to be exported, not {torch.__version__}"
        )
    return TraceError(f"tracing failed in {where}: {message[0]} ({advice})")


def explain_values(where: str, message: str) -> DataDependentError:
    """The error where control flow or sizes depend on values."""
    return DataDependentError(
        f"tracing failed in {where}: its control flow or its sizes depend on values, which torch.export "
        "cannot follow, as `if x.sum() > 0`, indexing by a mask, int(x.max()), or distributions, which need "
        "validate_args=False; layers in a module of their own, without these, are traced by themselves "
        f"({message})"
    )
