"""nn.Module + example input -> PathGraph, through torch.export."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.overrides import TorchFunctionMode

from pathsgd.errors import TraceError
from pathsgd.graph.builder import Builder, Ends, Paths, Unknown, parameters_of
from pathsgd.graph.nodes import Stored, Weight
from pathsgd.graph.path_graph import PathGraph, unwrap
from pathsgd.graph.regions import describe_parameters, find_regions
from pathsgd.graph.rules import RULES, Call

LARGEST_LITERAL = 1 << 16

Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def trace(
    model: nn.Module,
    example_input: Example | PathGraph | None = None,
    *,
    batch_dim: int | None = 0,
) -> PathGraph:
    """The path graph of ``model``.

    Args:
        model: any module. It is not run on real data, not copied and not changed.
        example_input: a tensor, a tuple of positional inputs, or a dict of keyword inputs; only shapes
            and dtypes matter. A PathGraph is returned as it is. May be left out for an
            ``nn.Sequential`` that starts with a Linear.
        batch_dim: the batch axis of the inputs. Paths are counted at batch one, whatever the size of
            this axis in the example; all other axes count. ``None`` if there is no batch axis.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sorted(trace(model).parameters)
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    if isinstance(example_input, PathGraph):
        return example_input
    model = unwrap(model)
    _check_parameters(model)
    args, kwargs = _as_inputs(model, example_input)
    program, notes = _export_at_batch_one(model, args, kwargs, batch_dim)
    return _build(model, program, notes)


def _check_parameters(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TraceError(f"expected an nn.Module, got {type(model).__name__}")
    named = list(model.named_parameters())
    if not named:
        raise TraceError(f"{type(model).__name__} has no parameters: there is nothing to trace")
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TraceError(f"parameter {name!r} is lazy: run the model on one batch first")
        if parameter.is_complex():
            raise TraceError(
                f"parameter {name!r} is complex; path norms are defined for real weights: "
                "hold its real and imaginary parts as two real parameters"
            )
        if parameter.layout != torch.strided:
            raise TraceError(
                f"parameter {name!r} has layout {parameter.layout}; make it dense with .to_dense()"
            )


def _as_inputs(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example is None:
        first = next(iter(model.children()), None) if isinstance(model, nn.Sequential) else None
        if not isinstance(first, nn.Linear):
            raise TraceError(
                "example_input can be left out only for an nn.Sequential that starts with a Linear; "
                "pass a tensor of the shape the model takes"
            )
        return (first.weight.new_zeros(1, first.in_features),), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


# Export


def _export_at_batch_one(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int | None
) -> tuple[ExportedProgram, list[str]]:
    cut = _cut_batch((args, kwargs), batch_dim)
    if cut is None:
        return _export(model, args, kwargs), []
    try:
        return _export(model, *cut), _time_first(model) if batch_dim == 0 else []
    except TraceError:
        # Perhaps the model fixes its batch size, or the example has no batch axis at all.
        note = (
            f"axis {batch_dim} of the example could not be cut to one entry, so all of it counts "
            "as positions; if it is no batch axis, pass batch_dim=None"
        )
        return _export(model, args, kwargs), [note]


def _time_first(model: nn.Module) -> list[str]:
    """A note if axis 0, which was taken for the batch, may be time. Only the user can know."""
    for name, module in model.named_modules():
        layers = (nn.RNNBase, nn.MultiheadAttention)
        inner = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
        if isinstance(inner, layers) and not inner.batch_first:
            return [
                f"{name!r} ({type(module).__name__}) takes time first, and axis 0 of the example was taken "
                "for the batch; if it is time, pass batch_dim=1"
            ]
    return []


def _cut_batch(inputs: Any, batch_dim: int | None) -> Any | None:
    """The inputs at batch one; None if they are already."""
    tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    if batch_dim is None or not tensors or tensors[0].dim() <= batch_dim:
        return None
    size = tensors[0].shape[batch_dim]
    if size == 1:
        return None

    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() <= batch_dim or x.shape[batch_dim] != size:
            return x
        shape = list(x.shape)
        shape[batch_dim] = 1
        return x.narrow(batch_dim, 0, 1) if size else x.new_zeros(shape)

    return pytree.tree_map(cut, inputs)


class _RunningStatistics(TorchFunctionMode):
    """Batch norm by its running statistics, also in training mode: batch one has no others."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is nn.functional.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
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


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    try:
        with _untouched(model), _RunningStatistics(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, args, kwargs, strict=False)
            if _mutates(program):
                program = program.run_decompositions({})
    except Exception as error:
        raise _explained(model, error, args, kwargs) from error
    return program


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Puts back what a forward pass under export leaves in the modules (fake tensors, for one)."""
    saved = [(module, dict(module.__dict__)) for module in model.modules()]
    lists = [
        (value, list(value)) for _, attributes in saved for value in attributes.values()
        if isinstance(value, list)
    ]  # fmt: skip
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for module, attributes in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for value, items in lists:
            value[:] = items


def _mutates(program: ExportedProgram) -> bool:
    """Whether an activation is written in place, so that the program must be made functional."""
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        value = node.args[0].meta.get("val") if node.args else None
        if isinstance(value, Tensor) and value.is_floating_point():
            return True
    return False


def _explained(
    model: nn.Module, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TraceError:
    """A TraceError that names the module in which export failed, and says what to do."""
    names = {module: name for name, module in model.named_modules()}
    where = type(model).__name__
    for frame, _ in traceback.walk_tb(error.__traceback__):
        inner = frame.f_locals.get("self")
        if isinstance(inner, nn.Module) and names.get(inner):
            where = f"{names[inner]!r} ({type(inner).__name__})"
    shapes = [tuple(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    message = str(error).strip().splitlines() or [type(error).__name__]
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        advice = (
            "its control flow depends on values, which torch.export cannot follow; rewrite it with "
            "torch.where or trace the part of the model that does not need it"
        )
    else:
        advice = f"check that example_input {shapes} is what the model's forward takes"
    return TraceError(f"tracing failed in {where}: {message[0]} ({advice})")


# From the exported program to the language of paths


def _build(model: nn.Module, program: ExportedProgram, notes: list[str]) -> PathGraph:
    builder = Builder(notes=notes)
    environment = _Environment(model, program, builder)
    outputs: list[Any] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            environment.placeholder(node)
        elif node.op == "call_function":
            environment.call(node)
        elif node.op == "output":
            specs = program.graph_signature.output_specs
            outputs = [
                environment.values.get(value) for spec, value in zip(specs, node.args[0], strict=True)
                if spec.kind == OutputKind.USER_OUTPUT and isinstance(value, fx.Node)
            ]  # fmt: skip
    returned = tuple(value.node for value in outputs if isinstance(value, Paths))
    boundaries = dict(builder.ends)
    for node_id in returned:
        builder.ends[node_id] = "output"
    regions = find_regions(builder.nodes)
    parameters = describe_parameters(model, builder, regions, environment.names)
    return PathGraph(
        type(model).__name__, tuple(builder.nodes), builder.ends, returned, regions, parameters,
        tuple(builder.notes), boundaries,
    )  # fmt: skip


class _Environment:
    """What each node of the exported program stands for, and how an operator is looked up."""

    def __init__(self, model: nn.Module, program: ExportedProgram, builder: Builder) -> None:
        self.builder = builder
        self.program = program
        self.values: dict[fx.Node, Any] = {}
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), name)
        self.names = {
            name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}

    def placeholder(self, node: fx.Node) -> None:
        spec = self.specs[node.name]
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            self.values[node] = value
            return
        shape = tuple(map(int, value.shape))
        target = spec.target or ""
        if spec.kind == InputKind.PARAMETER:
            self.values[node] = Weight(shape, Stored(shape, self.names[target]))
        elif target in self.buffers and value.is_floating_point():
            self.values[node] = Weight(shape, None, (Stored(shape, target),), "buffer")
        elif spec.kind == InputKind.USER_INPUT and value.is_floating_point():
            self.values[node] = self.builder.begin(shape, "input")
        else:
            self.values[node] = self._literal(target, shape, value)

    def _literal(self, target: str, shape: tuple[int, ...], fake: Tensor) -> Weight | Unknown:
        """A tensor written in the model's code, by its numbers; anything else carries no path."""
        constant = self.program.constants.get(target)
        if isinstance(constant, Tensor) and fake.is_floating_point():
            if constant.numel() <= LARGEST_LITERAL:
                numbers = tuple(map(float, constant.detach().flatten().tolist()))
                return Weight(shape, None, (Stored(shape, literal=numbers),), "constant")
            return Unknown(shape, True, "a large tensor the model keeps outside its buffers")
        return Unknown(shape, fake.is_floating_point(), "a tensor of integers")

    def call(self, node: fx.Node) -> None:
        if node.target is getattr and len(node.args) == 2:
            return
        if getattr(node.target, "__name__", "") == "getitem":
            self._getitem(node)
            return
        builder = self.builder
        stack = node.meta.get("nn_module_stack") or {}
        builder.where = next((path for path, _ in reversed(list(stack.values()))), "")
        call = self._as_call(node)
        rule = RULES.get(call.name)
        carries = _leaves(call.arguments)
        try:
            if not any(isinstance(value, (Paths, Weight)) for value in carries) and rule is None:
                raise Ends(f"a constant made by {call.name}")
            if rule is None:
                raise Ends(f"{call.name} is not positively homogeneous or has no rule")
            result = rule(builder, call)
            if isinstance(result, list) and isinstance(node.meta.get("val"), Tensor):
                result = result[0]
            self.values[node] = result
        except Ends as reason:
            self.values[node] = self._ended(node, call, str(reason), carries)

    def _ended(self, node: fx.Node, call: Call, reason: str, inputs: list[Any]) -> Any:
        """The operator is no path: what it reads ends there, and what it returns begins anew."""
        carries_paths = any(isinstance(value, Paths) for value in inputs)
        parameters = frozenset().union(*map(parameters_of, inputs)) if inputs else frozenset()
        if carries_paths:
            for value in inputs:
                self.builder.end(value, reason)

        def result(fake: Any) -> Any:
            if not isinstance(fake, Tensor):
                return fake
            shape = tuple(map(int, fake.shape))
            if carries_paths and fake.is_floating_point():
                return self.builder.begin(shape, reason)
            computed = f"a weight computed by {call.name}" if parameters else reason
            return Unknown(shape, fake.is_floating_point(), computed, parameters)

        returned = node.meta.get("val")
        if isinstance(returned, (tuple, list)):
            return [result(fake) for fake in returned]
        return result(returned)

    def _getitem(self, node: fx.Node) -> None:
        source, index = node.args[0], node.args[1]
        values = self.values[source] if isinstance(source, fx.Node) else source
        assert isinstance(index, int)
        if isinstance(values, list):
            # A rule may leave out outputs that carry no path, such as the indices of max pooling.
            if index < len(values):
                self.values[node] = values[index]
                return
        elif index == 0:
            self.values[node] = values
            return
        fake = node.meta["val"]
        floating = isinstance(fake, Tensor) and fake.is_floating_point()
        shape = tuple(fake.shape) if isinstance(fake, Tensor) else ()
        self.values[node] = Unknown(shape, floating, "a secondary output")

    def _as_call(self, node: fx.Node) -> Call:
        schema = getattr(node.target, "_schema", None)
        bound: dict[str, Any] = {}
        if schema is not None:
            name = schema.name.removeprefix("aten::")
            for k, argument in enumerate(schema.arguments):
                if k < len(node.args):
                    bound[argument.name] = node.args[k]
                elif argument.name in node.kwargs:
                    bound[argument.name] = node.kwargs[argument.name]
                else:
                    bound[argument.name] = argument.default_value
        else:
            name = getattr(node.target, "__name__", str(node.target))
            bound = {str(k): value for k, value in enumerate(node.args)}
        if name not in RULES and name.endswith("_"):
            name = name.rstrip("_")
        arguments = {key: self._value(value) for key, value in bound.items()}
        fake = node.meta.get("val")
        fake = fake[0] if isinstance(fake, (tuple, list)) and fake else fake
        shape = tuple(map(int, fake.shape)) if isinstance(fake, Tensor) else ()
        return Call(name, arguments, shape)

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = self.values.get(argument)
            if isinstance(value, list):
                return value[0] if value else None
            return value
        if isinstance(argument, (tuple, list)):
            return [self._value(item) for item in argument]
        return argument


def _leaves(arguments: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in arguments.values():
        found.extend(value if isinstance(value, list) else [value])
    return [value for value in found if isinstance(value, (Paths, Weight, Unknown))]
