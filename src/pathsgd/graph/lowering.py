"""Exported program -> nodes of the graph, operator by operator, by the rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from pathsgd._torch import is_about_values, operator_schema
from pathsgd.errors import PathError
from pathsgd.graph.builder import Builder, Ends, Paths, Unknown, parameters_of
from pathsgd.graph.export import own_name
from pathsgd.graph.nodes import Reshape, Stored, Weight
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.regions import describe_parameters, find_regions
from pathsgd.graph.rules import RULES, Call, OperatorRule, why_it_ends
from pathsgd.graph.rules.selection import Index, as_index, join
from pathsgd.sharding import is_sharded

if TYPE_CHECKING:
    from torch.export import ExportedProgram

LARGEST_LITERAL = 1 << 16
MOST_UNITS = 1 << 20
"""Beyond so many entries a parameter does not act as an activation, whose every entry is a unit."""
INNER = ("wrap_with_set_grad_enabled", "wrap_with_autocast", "cond")
"""Operators that call a program inside the program."""


def lower(model: nn.Module, program: ExportedProgram, notes: list[str]) -> PathGraph:
    """The PathGraph of an exported program."""
    builder = Builder(notes=notes)
    names = Names(model)
    returned = write_nodes(builder, program, names)
    for node_id in returned:
        builder.ends[node_id] = "output"
    builder.end_at_statistics(returned)
    return build_graph(model, builder, names, returned)


def write_nodes(
    builder: Builder, program: ExportedProgram, names: Names, inside: str | None = None, begin: str = "input"
) -> tuple[int, ...]:
    """Writes the nodes of an exported program, and returns those of its outputs. ``inside`` is the module of
    the model that was exported, if not all of it."""
    lowering = _Lowering(names, program, builder, inside, begin)
    outputs: list[Any] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            lowering.placeholder(node)
        elif node.op == "call_function":
            lowering.call(node)
        elif node.op == "output":
            builder.where = inside or ""
            outputs = lowering.outputs(node)
    return tuple(dict.fromkeys(value.node for value in outputs if isinstance(value, Paths)))


def build_graph(model: nn.Module, builder: Builder, names: Names, returned: tuple[int, ...]) -> PathGraph:
    """The PathGraph of the nodes that were written."""
    regions = find_regions(builder.nodes)
    parameters = describe_parameters(model, builder, regions, names.parameters)
    return PathGraph(
        type(model).__name__, tuple(builder.nodes), builder.ends, returned, regions, parameters,
        tuple(dict.fromkeys(builder.notes)), tuple(dict.fromkeys(builder.boundaries)), builder.multiplied,
        frozenset(builder.ends.keys() - builder.stopped - set(returned)),
    )  # fmt: skip


class Names:
    """The names of a model's tensors."""

    def __init__(self, model: nn.Module) -> None:
        first: dict[int, str] = {}
        named = list(model.named_parameters(remove_duplicate=False))
        for name, parameter in named:
            first.setdefault(id(parameter), name)
        self.parameters = {name: first[id(parameter)] for name, parameter in named}
        """By any name of a parameter, the one it is described under."""
        self.memory: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters():
            if not parameter.is_meta and not is_sharded(parameter) and parameter.numel():
                self.memory.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}


class _Lowering:
    """Keeps what each node of the exported program stands for, and looks operators up."""

    def __init__(
        self, names: Names, program: ExportedProgram, builder: Builder, inside: str | None, begin: str
    ) -> None:
        self.builder = builder
        self.program = program
        self.values: dict[fx.Node, Any] = {}
        self.numbers: dict[fx.Node, Tensor] = {}
        self.names = names
        self.inside = inside
        self.begin = begin
        self.specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}

    def own_name(self, name: str) -> str:
        """A name in the exported program as the whole model has it."""
        name = own_name(name)
        if self.inside is None:
            return name
        inner = name.removeprefix("module").removeprefix(".")  # of a Part
        return f"{self.inside}.{inner}" if inner else self.inside

    def placeholder(self, node: fx.Node) -> None:
        spec = self.specs[node.name]
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            self.values[node] = value
            return
        shape = tuple(map(int, value.shape))
        target = self.own_name(spec.target or "")
        if spec.kind.name == "PARAMETER":
            name = self.names.parameters[target]
            if node.users:
                self.builder.read.add(name)
            if value.element_size() < 4:
                self.builder.narrow.add(name)
            self.values[node] = Weight(shape, Stored(shape, name))
        elif target in self.names.buffers and value.is_floating_point():
            self.values[node] = Weight(shape, None, (Stored(shape, target),), "buffer")
        elif spec.kind.name == "USER_INPUT" and value.is_floating_point():
            self.values[node] = self.builder.begin(shape, self.begin)
        else:
            self.values[node] = self._literal(spec.target or "", shape, value)
            if isinstance(self.values[node], Index):
                self.numbers[node] = self.program.constants[spec.target or ""]

    def _literal(self, spec_target: str, shape: tuple[int, ...], fake: Tensor) -> Weight | Unknown:
        """A tensor written in the model's code, by its numbers; anything else carries no path."""
        constant = self.program.constants.get(spec_target)
        if isinstance(constant, Tensor) and constant.layout == torch.strided and not constant.is_meta:
            for name in self.names.memory.get(constant.untyped_storage().data_ptr(), ()):
                self.builder.outside.setdefault(name, "read through a view that the model keeps")
        if isinstance(constant, Tensor) and fake.is_floating_point():
            if constant.is_meta:
                return Unknown(shape, True, "a tensor without values")
            if constant.numel() <= LARGEST_LITERAL:
                numbers = tuple(map(float, constant.detach().flatten().tolist()))
                return Weight(
                    shape, None, (Stored(shape, literal=numbers, views=(Reshape(shape),)),), "constant"
                )
            return Unknown(shape, True, "a large tensor the model keeps outside its buffers")
        if isinstance(constant, Tensor) and not constant.is_meta and constant.numel() <= LARGEST_LITERAL:
            return as_index(constant)
        return Unknown(shape, fake.is_floating_point(), "a tensor of integers")

    def call(self, node: fx.Node) -> None:
        if getattr(node.target, "__name__", "") == "getitem":
            self._getitem(node)
            return
        if node.meta.get("val") is None:
            return  # an assertion: it returns nothing, so it is no part of the function
        if self._is_inner(node):
            self._inner(node)
            return
        if self._integers(node):
            return
        builder = self.builder
        stack = node.meta.get("nn_module_stack") or {}
        builder.where = self.own_name(next((path for path, _ in reversed(list(stack.values()))), ""))
        call = self._as_call(node)
        rule = RULES.get(call.name)
        carries = _leaves(call.arguments)
        try:
            if rule is None:
                constant = not any(isinstance(value, (Paths, Weight)) for value in carries)
                raise Ends(f"a constant made by {call.name}" if constant else why_it_ends(call.name))
            result = self._apply(rule, call)
            for name in call.arguments:
                if name not in call.read and name not in rule.ignores:
                    for value in _leaves({name: call.arguments[name]}):
                        builder.end(value, f"{call.name} reads it as its {name}")
            if isinstance(fake := node.meta.get("val"), Tensor):
                result = result[0] if isinstance(result, list) else result
                if isinstance(result, (Paths, Weight)) and not (call.floating or fake.is_complex()):
                    raise Ends("a cast to integers is not positively homogeneous")
            self.values[node] = result
        except Ends as reason:
            self.values[node] = self._end(node, call, str(reason), carries)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, PathError) or is_about_values(error):
                raise
            unknown = f"the rule for {call.name} does not know these arguments"  # no axes, no entries
            self.values[node] = self._end(node, call, unknown, carries)

    def _apply(self, rule: OperatorRule, call: Call) -> Any:
        """What the rule makes of a call. A parameter that it does not take as one, as a table that is
        normalised, acts as an activation: what a constant leads to."""
        try:
            return rule.write(self.builder, call)
        except Ends:
            first, data = next(iter(call.arguments.items()), ("", None))
            if not isinstance(data, Weight) or data.parameter is None or not call.floating:
                raise
            if math.prod(data.shape) > MOST_UNITS:
                raise
            arguments = {**call.arguments, first: self.builder.paths(data.as_role("bias"))}
            return rule.write(self.builder, replace(call, arguments=arguments))

    def _is_inner(self, node: fx.Node) -> bool:
        """Whether it calls a program inside the program that writes nothing in place."""
        if getattr(node.target, "__name__", str(node.target)) not in INNER:
            return False
        programs = [n for n in node.all_input_nodes if n.op == "get_attr"]
        graphs = [_program_of(n) for n in programs]
        schemas = [operator_schema(inner.target) for graph in graphs for inner in graph.nodes]
        return bool(graphs) and not any(schema is not None and schema.is_mutable for schema in schemas)

    def _inner(self, node: fx.Node) -> None:
        """A program inside the program, of autocast, no_grad or branches. Both branches count."""
        flat: list[Any] = [
            a for arg in node.args for a in (arg if isinstance(arg, (tuple, list)) else (arg,))
        ]
        programs = [k for k, a in enumerate(flat) if isinstance(a, fx.Node) and a.op == "get_attr"]
        inputs = flat[programs[-1] + 1 :]
        results = []
        for k in programs:
            results.append(self._run_inner(_program_of(flat[k]), inputs))
        merged = []
        for k, values in enumerate(zip(*results, strict=True)):
            fake = node.meta["val"][k]
            call = Call("cond", {}, tuple(map(int, fake.shape)), fake.is_floating_point())
            try:
                merged.append(values[0] if len(values) == 1 else join(self.builder, call, values))
            except Ends as reason:
                for value in values:
                    self.builder.end(value, str(reason))
                merged.append(self.builder.begin(call.shape, str(reason)))
        self.values[node] = merged

    def _run_inner(self, graph: fx.Graph, inputs: list[Any]) -> list[Any]:
        given = iter(inputs)
        for inner in graph.nodes:
            if inner.op == "placeholder":
                self.values[inner] = self._value(next(given))
            elif inner.op == "call_function":
                self.call(inner)
        results: Any = graph.output_node().args[0]
        return [self._value(result) for result in results]

    def _integers(self, node: fx.Node) -> bool:
        """Indices that the code computes of constants alone, by their numbers."""
        fake = node.meta["val"]
        if not isinstance(fake, Tensor) or fake.is_floating_point() or fake.numel() > LARGEST_LITERAL:
            return False
        if fake.is_meta or not all(k in self.numbers for k in node.all_input_nodes):
            return False
        schema = operator_schema(node.target)
        if schema is None or schema.is_mutable:
            return False
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.numbers.__getitem__)
        operator: Any = node.target
        self.numbers[node] = operator(*args, **kwargs)
        self.values[node] = as_index(self.numbers[node])
        return True

    def outputs(self, node: fx.Node) -> list[Any]:
        """Returns what the model returns. Whatever else leaves it (a buffer it writes) ends there as well."""
        returned: list[Any] = []
        specs = self.program.graph_signature.output_specs
        results = node.args[0]
        assert isinstance(results, (tuple, list))
        for spec, result in zip(specs, results, strict=True):
            value = self.values.get(result) if isinstance(result, fx.Node) else None
            value = value[0] if isinstance(value, list) and value else value
            if spec.kind.name == "USER_OUTPUT":
                returned.append(value)
            if isinstance(value, Paths):
                if spec.kind.name != "USER_OUTPUT":
                    self.builder.end(value, "written to a buffer")
            elif isinstance(value, (Weight, Unknown)):
                self.builder.end(value, "returned by the model")
        return returned

    def _end(self, node: fx.Node, call: Call, reason: str, inputs: list[Any]) -> Any:
        """The operator is no path: what it reads ends there, and what it returns begins anew."""
        carrying = [value for value in inputs if isinstance(value, Paths)]
        parameters = frozenset().union(*map(parameters_of, inputs)) if inputs else frozenset()
        if not carrying and parameters:
            reason = f"a weight computed by {call.name}"
        for value in inputs:
            self.builder.end(value, reason)

        def result(fake: Any) -> Any:
            if not isinstance(fake, Tensor):
                return fake
            shape = tuple(map(int, fake.shape))
            if carrying and (fake.is_floating_point() or fake.is_complex()):
                return self.builder.begin(shape, reason)
            return Unknown(shape, fake.is_floating_point(), reason, parameters)

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
        schema = operator_schema(node.target)
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
        floating = isinstance(fake, Tensor) and fake.is_floating_point()
        return Call(name, arguments, shape, floating)

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = self.values.get(argument)
            if isinstance(value, list):
                return value[0] if value else None
            return value
        if isinstance(argument, (tuple, list)):
            return [self._value(item) for item in argument]
        return argument


def _program_of(node: fx.Node) -> Any:
    """The program inside the program that a node gets."""
    owner: Any = node.graph.owning_module
    return owner.get_submodule(str(node.target)).graph


def _leaves(arguments: Mapping[str, Any]) -> list[Any]:
    leaves: list[Any] = []
    for value in arguments.values():
        leaves.extend(value if isinstance(value, list) else [value])
    return [value for value in leaves if isinstance(value, (Paths, Weight, Unknown))]
