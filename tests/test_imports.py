"""Imports inside the package point one way: graph <- geometry <- optim <- paper."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

PUBLIC = "the public names"  # what `import pathsgd` and `from pathsgd import trace` reach for
PLACES = {
    "graph",
    "geometry",
    "optim",
    "console",
    "inspect",
    "bench",
    "paper",
    "cli",
    "errors",
    "dag",
    "functional",
}
TOOLS = {"console", "inspect", "bench", "paper", "cli"}

# Place -> the places it may import from, next to itself. dag is the oracle the rooms are tested
# against: it knows none of them; geometry alone knows it, to list the paths of a small network.
MAY_IMPORT = {
    "errors": set(),
    "graph": {"errors"},
    "geometry": {"errors", "graph", "dag"},
    "optim": {"errors", "graph", "geometry"},
    "console": {"errors", PUBLIC},
    "inspect": {"errors", "graph", "geometry", "optim", "console", "paper", PUBLIC},
    "bench": {"errors", "graph", "geometry", "optim", "console", "paper", PUBLIC},
    "paper": {"errors", "graph", "geometry", "optim", "console", PUBLIC},
    "cli": {"errors", "console", "inspect", "bench", "paper"},
    "dag": {"errors"},
    "functional": {"optim"},
    "__init__": {"errors", "graph", "geometry", "optim", "dag", "functional"},
}
GPU = ("optim", "fused", "gpu")


def imported_names(tree: ast.Module, package: list[str]) -> Iterator[tuple[ast.stmt, list[str]]]:
    """Every import statement with the dotted names it brings in, relative ones made absolute."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield statement, alias.name.split(".")
        elif isinstance(statement, ast.ImportFrom):
            base = package[: len(package) + 1 - statement.level] if statement.level else []
            module = statement.module.split(".") if statement.module else []
            for alias in statement.names:
                yield statement, [*base, *module, alias.name]


def statements_in_functions(tree: ast.Module) -> set[ast.AST]:
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {inner for function in functions for inner in ast.walk(function)}


def wrong_imports(src: Path) -> list[str]:
    """One line for each import under ``src/pathsgd`` that points where it must not."""
    found = []
    for path in sorted((src / "pathsgd").rglob("*.py")):
        file = path.relative_to(src)
        place = path.relative_to(src / "pathsgd").with_suffix("").parts[0]
        if place not in MAY_IMPORT:
            found.append(f"{file}: belongs to no room; give {place!r} a line in MAY_IMPORT")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), str(file))
        lazy = statements_in_functions(tree)
        needs_triton = file.parts[1:4] == GPU
        for statement, name in imported_names(tree, list(file.parts[:-1])):
            where = f"{file}:{statement.lineno}: {'.'.join(name)}"
            if name[0] == "pathsgd":
                target = name[1] if len(name) > 1 and name[1] in PLACES else PUBLIC
                if target != place and target not in MAY_IMPORT[place]:
                    found.append(f"{where}: {place} may not import {target}")
                if tuple(name[1:4]) == GPU and not needs_triton and statement not in lazy:
                    found.append(f"{where}: what needs triton is imported lazily, inside a function")
            elif name[0] == "triton" and needs_triton:
                continue
            elif name[0] != "torch" and name[0] not in sys.stdlib_module_names and place not in TOOLS:
                found.append(f"{where}: only paper may import more than torch and the standard library")
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
        (
            "graph/trace.py",
            "from pathsgd.geometry.norms import phi",
            "graph may not import geometry",
        ),
        ("graph/trace.py", "import pathsgd.optim.path_sgd", "graph may not import optim"),
        ("graph/trace.py", "from ..geometry import norms", "graph may not import geometry"),
        ("graph/trace.py", "from .. import geometry", "graph may not import geometry"),
        ("graph/__init__.py", "from ..geometry import norms", "graph may not import geometry"),
        ("graph/deep/er.py", "from ...optim import PathSGD", "graph may not import optim"),
        ("graph/trace.py", "def f():\n    from pathsgd import geometry", "graph may not import"),
        ("graph/trace.py", "from pathsgd import trace", "graph may not import the public names"),
        ("graph/trace.py", "import pathsgd", "graph may not import the public names"),
        ("graph/trace.py", "from pathsgd.dag import Dag", "graph may not import dag"),
        ("paper/sweep.py", "from pathsgd import dag", "paper may not import dag"),
        ("dag.py", "from .geometry import norms", "dag may not import geometry"),
        ("errors.py", "import pathsgd.graph", "errors may not import graph"),
        ("__init__.py", "from .paper import cli", "__init__ may not import paper"),
        ("graph/trace.py", "import numpy as np", "only paper may import more than torch"),
        ("optim/path_sgd.py", "def f():\n    import triton", "only paper may import more than"),
        ("optim/fused/sgd.py", "import triton.language as tl", "only paper may import more than"),
        ("optim/fused/sgd.py", "from pathsgd.optim.fused.gpu.code import f", "is imported lazily"),
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
        ("__init__.py", "from .dag import Dag\nfrom pathsgd.optim import PathSGD as PathSGD"),
        ("paper/cli.py", "import pathsgd\nfrom pathsgd.optim import path_sgd"),
        ("dag.py", "import torch\nfrom pathsgd.errors import PathsgdError"),
        (
            "graph/trace.py",
            "from __future__ import annotations\nimport torch.fx\nfrom . import rules",
        ),
        ("graph/trace.py", "from ..errors import PathsgdError\nfrom .rules import linear"),
        ("geometry/norms.py", "from pathsgd import errors, graph\nfrom .scales import gamma"),
        ("optim/path_sgd.py", "from pathsgd.geometry import scales\nfrom ..graph import trace"),
        ("optim/fused/gpu/code.py", "import triton.language as tl"),
        ("optim/fused/sgd.py", "def f():\n    from pathsgd.optim.fused.gpu import code\n    return code"),
        ("paper/figures.py", "import matplotlib.pyplot as plt\nfrom pathsgd import PathSGD, optim"),
    ],
)
def test_a_right_import_passes(tmp_path, file, source):
    write_module(tmp_path, file, source)
    assert wrong_imports(tmp_path) == []
