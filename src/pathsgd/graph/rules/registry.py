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
    """The arguments a rule has looked at. One it has not is no path: the tracer ends it."""

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


Result = Value | list[Value]
Rule = Callable[[Builder, Call], Result]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of the named ATen operators (in-place variants included)."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register
