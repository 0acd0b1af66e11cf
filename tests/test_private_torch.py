"""Private names of torch stand in pathsgd/_torch.py alone, so that a new torch breaks one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "pathsgd"
ATTRIBUTES = {
    "_version", "_orig_mod", "_schema", "_modules", "_parameters", "_buffers", "_forward_hooks",
    "_forward_pre_hooks",
}  # fmt: skip
"""Private attributes of torch's objects, also as strings for getattr."""
MISLEADING = {"torch.compiler.is_compiling"}
"""True in every thread while one thread exports: use _torch.is_compiling."""


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def dotted(node: ast.expr) -> str:
    """``torch.a.b`` of an attribute; empty if it does not start at a name."""
    if isinstance(node, ast.Attribute):
        return f"{inner}.{node.attr}" if (inner := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def names_in(node: ast.AST) -> list[str]:
    """The names of torch that one node of a syntax tree uses."""
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.Attribute(attr=attr):
            return [dotted(node), f"torch.*.{attr}" if attr in ATTRIBUTES else ""]
        case ast.Constant(str(value)) if value in ATTRIBUTES:
            return [f"torch.*.{value}"]
    return []


def strays(source: str) -> set[str]:
    found = {name for node in ast.walk(ast.parse(source)) for name in names_in(node)}
    return {
        name
        for name in found
        if name.startswith("torch.")
        and not name.startswith("torch.ops.")  # operators, which have public schemas
        and (name in MISLEADING or any(map(is_private, name.split("."))))
    }


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_private_names_of_torch_are_in_one_module(path):
    if path != PACKAGE / "_torch.py":
        assert strays(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_mul_(xs, 2)",
        "import torch.utils._pytree as pytree",
        "from torch.utils import _pytree",
        "from torch.optim.optimizer import _use_grad_for_differentiable",
        "torch._C._set_cudnn_benchmark(True)",
        "w._version",
        'getattr(module, "_orig_mod", None)',
        "node.target._schema",
        "torch.compiler.is_compiling()",
    ],
)
def test_a_stray_is_found(source):
    assert strays(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__\ntorch.optim.SGD",
        "torch.ops.aten._upsample_nearest_exact1d",
        "from pathsgd import _torch\n_torch.foreach('mul', xs, 2)",
        "self._graph",
    ],
)
def test_what_is_allowed(source):
    assert not strays(source)
