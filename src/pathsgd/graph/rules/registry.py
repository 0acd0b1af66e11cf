"""The table of rules: operator name -> how it is written in the language of paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pathsgd.graph.builder import Builder, Ends, Paths, Unknown, Value
from pathsgd.graph.nodes import Shape, Weight


@dataclass(frozen=True)
class Call:
    """One operator of the exported program: its name, its arguments by name, and what it returns first."""

    name: str
    arguments: Mapping[str, Any]
    shape: Shape
    floating: bool = True
    read: set[str] = field(default_factory=set)
    """The arguments a rule has read. The tracer ends the paths of those that it neither reads nor ignores."""

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self.arguments[name]

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of ``names`` this overload has, else ``default``."""
        self.read.update(names)
        for name in names:
            if self.arguments.get(name) is not None:
                return self.arguments[name]
        return default

    def paths(self, name: str) -> Paths:
        """An argument that must carry paths for the rule to apply."""
        value = self[name]
        if not isinstance(value, Paths):
            raise Ends(f"{self.name} of a value that is no activation")
        return value

    def weight(self, name: str) -> Weight:
        """An argument that must be a parameter, a buffer or a literal."""
        value = self[name]
        if isinstance(value, Weight):
            return value
        if isinstance(value, Unknown):
            raise Ends(value.reason)
        raise Ends(f"{self.name} of two activations")

    def ignore(self, name: str) -> None:
        """Declares that in this call an argument has no influence on the result."""
        self.read.add(name)


Result = Value | list[Value]
Write = Callable[[Builder, Call], Result]


@dataclass(frozen=True)
class OperatorRule:
    """The rule that writes an operator in the language of paths, and what else is known of the operator."""

    write: Write
    moves: bool
    """It moves, copies or creates data and computes nothing. How often it is called may depend on the batch
    size."""
    ignores: frozenset[str]
    """Arguments of which only the shape or the dtype matters."""


RULES: dict[str, OperatorRule] = {}


def rule(*names: str, moves: bool = False, ignores: tuple[str, ...] = ()) -> Callable[[Write], Write]:
    """Registers a function as the rule of the named ATen operators (in-place variants included)."""

    def register(write: Write) -> Write:
        for name in names:
            RULES[name] = OperatorRule(write, moves, frozenset(ignores))
        return write

    return register
