"""Every public name stands in the API reference, and its docstring documents what it takes and returns."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import pathsgd

API = Path(__file__).resolve().parent.parent / "docs" / "api"


def public_names():
    """Dotted name -> object, for everything that the library exports."""
    found = {f"pathsgd.{name}": getattr(pathsgd, name) for name in pathsgd.__all__}
    for name, module in list(found.items()):
        if isinstance(module, ModuleType):
            del found[name]
            functions = inspect.getmembers(module, inspect.isfunction)
            found.update({f"{name}.{key}": value for key, value in functions if not key.startswith("_")})
    return found


def public_methods(cls):
    """Name -> function of what a class and its bases in this library define for users."""
    if issubclass(cls, (Exception, enum.Enum)):
        return {}
    return {
        name: member
        for name, member in inspect.getmembers(cls, lambda member: inspect.isfunction(inspect.unwrap(member)))
        if not name.startswith("_") and member.__module__.startswith("pathsgd")
    }


def sections(docstring):
    """The sections of a docstring in Google style: heading -> text."""
    found = re.split(r"^(Args|Attributes|Returns|Raises|Example):\n", docstring, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def entries(text):
    """The names that a section documents."""
    return set(re.findall(r"^    \*{0,2}(\w+):", text, re.MULTILINE))


def described_fields(cls):
    """The fields of a class that a string below them describes."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def gaps_of_fields(cls):
    fields = {field.name for base in cls.__mro__ if dataclasses.is_dataclass(base)
              for field in dataclasses.fields(base) if not field.name.startswith("_")}  # fmt: skip
    described = {name for base in cls.__mro__ if dataclasses.is_dataclass(base)
                 for name in described_fields(base)}  # fmt: skip
    found = sections(inspect.getdoc(cls) or "")
    described |= entries(found.get("Attributes", "")) | entries(found.get("Args", ""))
    return [f"field {name}" for name in sorted(fields - described)]


def gaps_of_function(function, docstring):
    """What the docstring of a function, or of a class for its arguments, leaves out."""
    found = sections(docstring)
    lines = [line for name in ("Args", "Raises") for line in found.get(name, "").splitlines()]
    gaps = [f"indent {line!r}" for line in lines if re.match(r"    (?!\*{0,2}\w+:)\S", line)]
    signature = inspect.signature(function)
    parameters = {name for name in signature.parameters if name != "self" and not name.startswith("_")}
    documented = entries(found.get("Args", ""))
    gaps += [f"argument {name}" for name in sorted(parameters - documented)]
    gaps += [f"argument {name}, which it does not take" for name in sorted(documented - parameters)]
    if signature.return_annotation not in (None, "None", inspect.Signature.empty) and "Returns" not in found:
        gaps.append("Returns")
    if re.search(r"^\s+raise [A-Z]", inspect.getsource(inspect.unwrap(function)), re.MULTILINE):
        gaps += [] if "Raises" in found else ["Raises"]
    return gaps


def gaps(name, value):
    """What the docstrings of a public name leave out."""
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return []
    docstring = inspect.getdoc(value) or ""
    missing = [] if docstring else ["docstring"]
    simple = inspect.isclass(value) and issubclass(value, Exception)
    if not simple and ">>>" not in docstring and name.count(".") == 1:
        missing.append("Example")
    if inspect.isfunction(value):
        return missing + gaps_of_function(value, docstring)
    if dataclasses.is_dataclass(value):
        missing += gaps_of_fields(value)
    elif not simple and not issubclass(value, enum.Enum) and inspect.isfunction(value.__init__):
        missing += gaps_of_function(value.__init__, docstring)
    for method, function in public_methods(value).items() if name.count(".") == 1 else ():
        own = inspect.getdoc(function)
        lacks = gaps_of_function(function, own) if own else ["docstring"]
        missing += [f"{method}(): {gap}" for gap in lacks]
    return missing


@pytest.mark.parametrize("name", public_names())
def test_it_stands_in_the_reference(name):
    documented = {
        line for page in API.glob("*.md") for line in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    }
    assert name in documented


@pytest.mark.parametrize(("name", "value"), public_names().items(), ids=public_names())
def test_its_docstring_is_complete(name, value):
    assert gaps(name, value) == []
