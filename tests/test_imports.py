"""Imports point one way: graph <- training <- geometry, balancing <- paths, muon, uses <- cli.

Of sister rooms none imports the other: paths knows geometry, muon knows balancing, uses knows all but paths.
The program (cli) and the study beside the package reach the library by its public names only.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

PUBLIC = "the public names"  # what `import pathsgd` and `from pathsgd import trace` reach for

# Room -> the rooms it may import from, next to itself. dag is the oracle the rooms are tested
# against: it knows none of them, and none knows it.
BASE = {"errors", "_torch", "sharding"}
MAY_IMPORT = {
    "errors": set(),
    "_torch": set(),
    "sharding": {"errors", "_torch"},
    "graph": BASE,
    "training": BASE | {"graph"},
    "geometry": BASE | {"graph", "training"},
    "balancing": BASE | {"graph", "training"},
    "paths": BASE | {"graph", "training", "geometry"},
    "muon": BASE | {"graph", "training", "balancing"},
    "uses": BASE | {"graph", "geometry", "balancing", "muon"},
    "dag": {"errors"},
    "functional": {"paths"},
    "__init__": {"errors", "graph", "geometry", "balancing", "paths", "muon", "uses", "dag", "functional"},
    "huggingface": {PUBLIC},
    "cli": {"errors", PUBLIC},
}
ROOM_NAMES = {f"pathsgd.{room}" for room in MAY_IMPORT}
MAY_IMPORT["study"] = {"functional", PUBLIC}
TOOLS = {"study"}
LAZY = {"uses": {"matplotlib"}}  # beside torch, in functions only
ALLOWED = {"torch", "pathsgd_entry_point", *sys.stdlib_module_names}


def imported_names(tree: ast.Module, package: list[str]) -> Iterator[tuple[ast.AST, list[str]]]:
    """Every dotted name that is imported, relative ones made absolute, and every `pathsgd.room` in use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = node.module.split(".") if node.module else []
            for alias in node.names:
                yield node, [*base, *module, alias.name]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ROOM_NAMES:
            yield node, ["pathsgd", node.attr]


def lazy_statements(tree: ast.Module) -> set[ast.AST]:
    """Those in functions, and those for type checkers only."""

    def is_lazy(node: ast.AST) -> bool:
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        return for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)

    return {inner for node in ast.walk(tree) if is_lazy(node) for inner in ast.walk(node)}


def wrong_imports(src: Path) -> list[str]:
    """One line for each import under ``src/pathsgd`` that points where it must not."""
    found = []
    study = src / "study" if (src / "study").exists() else src.parent / "study"
    for path in sorted([*(src / "pathsgd").rglob("*.py"), *study.rglob("*.py")]):
        file = path.relative_to(src if path.is_relative_to(src) else src.parent)
        room = "study" if file.parts[0] == "study" else file.with_suffix("").parts[1]
        if room not in MAY_IMPORT:
            found.append(f"{file}: belongs to no room; give {room!r} a line in MAY_IMPORT")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), str(file))
        lazy = lazy_statements(tree)
        needs_triton = "gpu" in file.parts or file.name == "kernels.py"
        for node, name in imported_names(tree, list(file.parts[:-1])):
            where = f"{file}:{node.lineno}: {'.'.join(name)}"
            if name[0] == "study" and room != "study":
                found.append(f"{where}: {room} may not import study")
            elif name[0] == "study":
                continue
            elif name[0] == "pathsgd":
                target = name[1] if len(name) > 1 and name[1] in MAY_IMPORT else PUBLIC
                if target != room and target not in MAY_IMPORT[room]:
                    found.append(f"{where}: {room} may not import {target}")
                if {"gpu", "kernels"} & set(name) and not needs_triton and node not in lazy:
                    found.append(f"{where}: what needs triton is imported lazily, inside a function")
            elif (name[0] == "triton" and needs_triton) or (node in lazy and name[0] in LAZY.get(room, ())):
                continue
            elif name[0] not in ALLOWED and room not in TOOLS:
                found.append(f"{where}: only tools may import more than torch and the standard library")
    return found


def test_imports_point_one_way():
    assert list((SRC / "pathsgd").rglob("*.py")), f"nothing to check under {SRC}"
    assert wrong_imports(SRC) == []


def write_module(src: Path, file: str, source: str) -> None:
    path = src / "pathsgd" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("graph/trace.py", "from pathsgd.geometry import norms", "graph may not import geometry"),
        ("graph/trace.py", "from pathsgd.geometry.norms import phi", "graph may not import geometry"),
        ("graph/trace.py", "import pathsgd.paths.path_sgd", "graph may not import paths"),
        ("graph/trace.py", "from ..geometry import norms", "graph may not import geometry"),
        ("graph/trace.py", "from .. import geometry", "graph may not import geometry"),
        ("graph/__init__.py", "from ..geometry import norms", "graph may not import geometry"),
        ("graph/deep/er.py", "from ...paths import PathSGD", "graph may not import paths"),
        ("graph/trace.py", "def f():\n    from pathsgd import geometry", "graph may not import"),
        ("graph/trace.py", "from pathsgd import trace", "graph may not import the public names"),
        ("graph/trace.py", "import pathsgd", "graph may not import the public names"),
        ("graph/trace.py", "from pathsgd.dag import Dag", "graph may not import dag"),
        ("geometry/norms.py", "from pathsgd.cli import inspect", "geometry may not import cli"),
        ("geometry/norms.py", "from pathsgd.balancing import rescale", "geometry may not import balancing"),
        ("balancing/rescale.py", "from pathsgd.geometry import gamma", "balancing may not import geometry"),
        ("muon/round.py", "from pathsgd.paths import path_sgd", "muon may not import paths"),
        ("paths/path_sgd.py", "from pathsgd.muon import round", "paths may not import muon"),
        ("cli/inspect.py", "from pathsgd.graph.trace import trace", "cli may not import graph"),
        ("cli/inspect.py", "from study.config import Run", "cli may not import study"),
        ("cli/inspect.py", "import tyro", "only tools may import more than torch"),
        ("cli/inspect.py", "from pathsgd.paths import PathSGD", "cli may not import paths"),
        ("../study/sweep.py", "from pathsgd import dag", "study may not import dag"),
        ("../study/sweep.py", "def f():\n    pathsgd.geometry.norms.phi()", "study may not import geometry"),
        ("../study/sweep.py", "from pathsgd import cli", "study may not import cli"),
        ("dag.py", "from .geometry import norms", "dag may not import geometry"),
        ("errors.py", "import pathsgd.graph", "errors may not import graph"),
        ("_torch.py", "from .errors import PathError", "_torch may not import errors"),
        ("__init__.py", "import study", "__init__ may not import study"),
        ("graph/trace.py", "import numpy as np", "only tools may import more than torch"),
        ("paths/path_sgd.py", "def f():\n    import triton", "only tools may import more than"),
        ("muon/sgd.py", "import triton.language as tl", "only tools may import more than"),
        ("uses/inspection.py", "import matplotlib", "only tools may import more than"),
        ("geometry/gamma.py", "def f():\n    import matplotlib", "only tools may import more than"),
        ("muon/sgd.py", "from pathsgd.muon.gpu.code import f", "is imported lazily"),
        ("helpers.py", "", "belongs to no room"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, source, complaint):
    write_module(tmp_path, file, source)
    (line,) = wrong_imports(tmp_path)
    assert complaint in line


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("__init__.py", "from .dag import Dag\nfrom pathsgd.paths import PathSGD as PathSGD"),
        ("dag.py", "import torch\nfrom pathsgd.errors import PathError"),
        ("graph/trace.py", "from __future__ import annotations\nimport torch.fx\nfrom . import rules"),
        ("graph/trace.py", "from ..errors import PathError\nfrom .._torch import tree_map"),
        ("geometry/norms.py", "from pathsgd import errors, graph\nfrom .gamma import gammas"),
        ("paths/path_sgd.py", "from pathsgd.geometry import gamma\nfrom ..graph import trace"),
        ("muon/gpu/code.py", "import triton.language as tl"),
        ("uses/inspection.py", "def f():\n    from matplotlib.figure import Figure"),
        ("muon/sgd.py", "def f():\n    from pathsgd.muon.gpu import code\n    return code"),
        ("../study/figures.py", "import matplotlib.pyplot as plt\nfrom pathsgd import PathSGD, functional"),
        (
            "cli/inspect.py",
            "import pathsgd\nfrom pathsgd.cli.user_model import load_model\npathsgd.balance(model)",
        ),
        ("cli/__init__.py", "from pathsgd.errors import PathError"),
    ],
)
def test_a_right_import_passes(tmp_path, file, source):
    write_module(tmp_path, file, source)
    assert wrong_imports(tmp_path) == []
