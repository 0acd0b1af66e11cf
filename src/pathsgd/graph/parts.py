"""The paths of a model that cannot be traced as a whole: those inside the largest of its modules that can.

What goes into a part and what comes out of it is fixed, so whatever the model does around it, a rescaling of
units inside changes nothing. What could make that untrue is refused by :mod:`pathsgd.graph.recording`, and a
parameter that is read outside the parts as well keeps its value.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd._torch import module_dicts, tree_leaves, tree_map, uncompiled
from pathsgd.errors import DataDependentError, TraceError
from pathsgd.graph.builder import Builder, Paths
from pathsgd.graph.export import examples_for, export_at_batch_one, silence_torch
from pathsgd.graph.lowering import Names, build_graph, write_nodes
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.recording import Call, Opaque, Recorder, Shaped, tensors_of
from pathsgd.graph.restoring import restore_modules
from pathsgd.graph.structure import ParameterInfo, ParameterStatus
from pathsgd.sharding import is_sharded

AROUND = "what is around the part that could be traced"
KINDS = 4
"""Calls of a module with arguments of more shapes than this are not looked into."""
NAMED = 4
"""Modules that a note names."""


def trace_in_parts(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
) -> PathGraph | None:
    """The graph of the parts that can be traced; None if there is none, or if the model cannot be run."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_of((args, kwargs))]
    if any(tensor.is_meta or is_sharded(tensor) for tensor in tensors):
        return None
    if any(uncompiled(module) is not module for module in model.modules()):
        return None  # what is compiled cannot be watched
    with restore_modules(model), silence_torch():
        training = [module for module in model.modules() if module.training]
        for module in training:
            module.training = False
        recorders = [_record(model, args, kwargs)]
        if recorders[0] is None:
            return None
        if training:  # a run in training mode may read more
            with restore_modules(model):
                for module in training:
                    module.training = True
                recorders.append(_record(model, args, kwargs))
        search = _Search(model, [recorder for recorder in recorders if recorder is not None])
        search.visit(recorders[0].calls)
    return search.finish(reason) if search.parts else None


def _record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder | None:
    """One run of the model, from the same random numbers in every process."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    for own_args, own_kwargs in examples_for(model, args, kwargs):
        with (
            contextlib.suppress(Exception),  # of the model's own
            restore_modules(model),
            torch.random.fork_rng(devices),
            torch.compiler.set_stance("force_eager"),
        ):
            torch.default_generator.manual_seed(0)
            _copy_buffers(model)
            recorder = Recorder(model)
            recorder.run(own_args, own_kwargs)
            return recorder
    return None


def _copy_buffers(model: nn.Module) -> None:
    """Replaces buffers by copies, which may be written to; ``restore_modules`` puts the old ones back."""
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        buffers = module_dicts(module)[2]
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = copies.setdefault(id(buffer), buffer.clone())


class Part(nn.Module):
    """A module with the arguments of one of its calls, of which only the tensors are inputs."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.module = call.module
        self.given = call.given
        self.training = call.module.training

    def example(self) -> tuple[Tensor, ...]:
        """Tensors to call it with."""
        return tuple(
            torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            for x in tree_leaves(self.given)
            if isinstance(x, Shaped)
        )

    def forward(self, *tensors: Tensor) -> Any:
        following = iter(tensors)

        def give(x: Any) -> Any:
            return next(following) if isinstance(x, Shaped) else x.value if isinstance(x, Opaque) else x

        args, kwargs = tree_map(give, self.given)
        # What it writes into an object that it was given leaves it as well.
        return self.module(*args, **kwargs), [
            x.value for x in tree_leaves(self.given) if isinstance(x, Opaque)
        ]


Key = tuple[nn.Module, str]


@dataclass
class _Search:
    """The walk down from the model to the largest modules that can be traced."""

    model: nn.Module
    recorders: list[Recorder]
    builder: Builder = field(default_factory=Builder)
    returned: list[int] = field(default_factory=list)
    parts: dict[Key, str] = field(default_factory=dict)
    """The names of the modules that were traced."""
    refused: dict[Key, str] = field(default_factory=dict)
    untraceable: dict[object, str] = field(default_factory=dict)
    """What depends on values, with the reason: nothing that contains it has to be tried."""

    def __post_init__(self) -> None:
        self.names = Names(self.model)
        own = {id(p): name for name, p in self.model.named_parameters()}
        self.named = {m: [own[id(p)] for p in ps] for m, ps in self.recorders[0].parameters.items()}
        """The names of the parameters in a piece of memory."""
        self.module_names = {module: name for name, module in self.model.named_modules()}
        self.calls: dict[Key, list[Call]] = {}
        for call in _all_calls(self.recorders[0].calls):
            self.calls.setdefault(_key(call), []).append(call)
        self.kinds = Counter(module for module, _ in self.calls)
        self.problems = {
            call.module: call.problem
            for recorder in self.recorders
            for call in _all_calls(recorder.calls)
            if call.problem
        }

    def visit(self, calls: list[Call]) -> None:
        for key in dict.fromkeys(map(_key, calls)):
            if key in self.parts or key in self.refused or not _has_units(key[0]):
                continue
            try:
                self.trace(key)
            except TraceError as error:
                self.refused[key] = str(error)
                if isinstance(error, DataDependentError):
                    self.untraceable[error.module or key[0]] = str(error)
                self.visit([child for call in self.calls[key] for child in call.children()])

    def trace(self, key: Key) -> None:
        """Writes the nodes of a part.

        Raises:
            TraceError: it cannot be traced.
        """
        module, calls = key[0], self.calls[key]
        name = self.module_names.get(module)
        if module is self.model or name is None:
            raise TraceError("all of the model")
        if module in self.problems:
            raise TraceError(self.problems[module])
        if self.kinds[module] > KINDS:
            raise TraceError(f"it is called with arguments of {self.kinds[module]} kinds")
        for reason in [self.untraceable[inner] for inner in module.modules() if inner in self.untraceable]:
            raise TraceError(reason)
        part = Part(calls[0])
        alone = _record(part, part.example(), {})
        if alone is None:
            raise TraceError("it cannot be run alone")
        ran = list(alone.calls[0].operators())
        if any(list(call.operators()) != ran for call in calls):
            raise TraceError("alone, given zeros, it does something else than in the model")
        trained = [c for recorder in self.recorders[1:] for c in _all_calls(recorder.calls) if _key(c) == key]
        if any(_without_dropout(call) != _without_dropout(calls[0]) for call in trained):
            raise TraceError("in training mode it does something else")
        program, _ = export_at_batch_one(part, part.example(), {}, None)
        attempt = Builder()
        try:
            write_nodes(attempt, program, self.names, name, AROUND)
        except Exception as error:
            raise TraceError(str(error)) from error
        if not {name for _, memory in ran for m in memory for name in self.named[m]} <= attempt.read:
            raise TraceError("its trace does not read all that it reads")
        returned = write_nodes(self.builder, program, self.names, name, AROUND)
        for node in returned:
            self.builder.end(Paths(node), f"read by {AROUND}")
        self.returned += returned
        self.parts[key] = name

    def finish(self, reason: str) -> PathGraph:
        """The graph of all parts, with the parameters that something else reads as well kept as they are."""
        for recorder in self.recorders:
            for memory in self._read_around(recorder):
                for name in self.named[memory]:
                    self.builder.outside.setdefault(name, f"read by {AROUND}")
        read = set().union(*(recorder.read for recorder in self.recorders))
        unread = [name for memory, names in self.named.items() if memory not in read for name in names]
        self.builder.end_at_statistics(self.returned)
        self.builder.notes += self.notes(reason, unread)
        graph = build_graph(self.model, self.builder, self.names, ())
        roles = guess_roles(self.model)

        def describe(info: ParameterInfo) -> ParameterInfo:
            if info.status is ParameterStatus.UNUSED:
                info = replace(info, reason="not run with this example")
            return info if info.roles else replace(info, roles=roles[info.name])

        return replace(graph, parameters={name: describe(info) for name, info in graph.parameters.items()})

    def _read_around(self, recorder: Recorder) -> Iterator[Any]:
        """The memory of the parameters that are read outside the calls of traced parts."""
        yield from recorder.outside
        waiting: list[Any] = list(recorder.calls)
        for event in waiting:
            if not isinstance(event, Call):
                yield from event[1]
            elif _key(event) not in self.parts:
                waiting += event.events

    def notes(self, reason: str, unread: list[str]) -> list[str]:
        whole = f"it could not be traced as a whole ({_first_sentence(reason)}); traced, in eval mode, were"
        notes = [f"{whole} {_list(list(dict.fromkeys(self.parts.values())))}"]
        known = {*self.parts.values(), *(self.module_names.get(module, "") for module, _ in self.refused)}
        left = {
            name: why
            for (module, _), why in self.refused.items()
            if (name := self.module_names.get(module))
            if [*module.parameters(recurse=False)] or not any(n.startswith(f"{name}.") for n in known)
        }
        notes += [f"not traced: {name}: {_first_sentence(why)}" for name, why in list(left.items())[:NAMED]]
        if len(left) > NAMED:
            notes.append(f"not traced: {len(left) - NAMED} more")
        if unread:
            notes.append(f"not run with this example: {_list(unread)}")
        return notes


def _key(call: Call) -> Key:
    return call.module, repr(call.given)


def _all_calls(calls: list[Call]) -> Iterator[Call]:
    for call in calls:
        yield call
        yield from _all_calls(call.children())


def _without_dropout(call: Call) -> list[Any]:
    """What a module ran but for what dropout and the counter of a batch norm run in training mode."""
    names = ("bernoulli_", "div_", "mul", "empty_like", "native_dropout", "add_")
    return [(op, memory) for name, memory in call.operators() if (op := name.split(".")[1]) not in names]


def _has_units(module: nn.Module) -> bool:
    """Whether there can be a unit inside: a weight into it and one out of it."""
    return sum(name.rpartition(".")[2] != "bias" for name, _ in module.named_parameters()) > 1


def _list(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + f" and {len(names) - NAMED} more" * (len(names) > NAMED)


def _first_sentence(reason: str) -> str:
    return reason.splitlines()[0].partition(" (its control flow")[0].partition(" (check that")[0]


def guess_roles(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """What parameters are used as, by name, from what torch calls them."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}

    def guess(name: str, p: nn.Parameter) -> tuple[str, ...]:
        if id(p) in embeddings:
            return ("embedding",)
        return ("weight",) if p.dim() >= 2 and "weight" in name.rpartition(".")[2] else ()

    return {name: guess(name, p) for name, p in model.named_parameters()}
