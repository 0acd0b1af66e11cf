"""The user's model: options, import of the code, weights and inputs.

An exception in the user's code becomes a PathError of one line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pathsgd import Inputs, PathError, PathGraph, TraceError, trace

CHECKPOINT_KEYS = ("state_dict", "model_state_dict", "model", "state")
"""Keys under which checkpoints keep a model's state dict."""
SAVED_MODELS = (".pt", ".pth", ".pt2")
MAX_REASON = 160
"""Characters of what load_state_dict says that are printed."""


def make_parser(about: str) -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="pathsgd inspect", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="package.module:name or path/to/file.py:name of a model, or of a "
        "class or function that makes one; the current folder can be imported from. Or, with --trust, a file "
        "of torch.save(model) (.pt, .pth) or torch.export.save (.pt2)")  # fmt: skip
    add("--trust", action="store_true", help="read a model from a file, which can run code that is in it")
    add("--arguments", type=_read_keywords, default={}, metavar="JSON",
        help="keyword arguments of the class or function, for a model of transformers those of its "
        "configuration: '{\"width\": 64}'")  # fmt: skip
    add("--input-shape", type=_read_shape, action="append", default=[], metavar="SIZES",
        help="sizes of an input, batch included: 1,3,32,32; once for each positional input")  # fmt: skip
    add("--input-dtype", type=_read_dtype, action="append", default=[], metavar="DTYPE",
        help="float32, int64, ...: one for all or one for each; by default float32")  # fmt: skip
    add("--batch-dim", type=_read_axis, default=0, metavar="AXIS", help="batch axis of the inputs, or none")
    add("--weights", type=Path, metavar="FILE", help="load this state dict, or a checkpoint that holds one")
    add("--seed", type=int, default=0, help="seed of weights that are drawn at random")
    add("--p", type=float, default=2.0, help="order of the norms, from 1 to inf")
    add("--figure", type=Path, metavar="FILE", help="draw the layers into this file, a PNG, SVG or PDF")
    return parser


def load_model(options: argparse.Namespace) -> tuple[nn.Module, Inputs | None]:
    """Makes the model that the options name, with its weights; and its inputs, if they were saved with it.

    Raises:
        PathError: It cannot be imported or made, or its weights do not fit.
    """
    torch.manual_seed(options.seed)
    text, example = options.target, None
    if Path(text).suffix in SAVED_MODELS:
        target, example = _read_model(Path(text), options.trust)
    else:
        target = import_target(text)
    if not isinstance(target, nn.Module):
        if not callable(target):
            raise PathError(f"{text} is a {type(target).__name__}, not a model or a factory of models")
        try:
            # Classes of transformers take a configuration, whose class they name.
            configure = None if "config" in options.arguments else getattr(target, "config_class", None)
            target = target(configure(**options.arguments)) if configure else target(**options.arguments)
        except (Exception, SystemExit) as error:
            raise PathError(f"{text} raised {describe(error)}") from error
        if not isinstance(target, nn.Module):
            raise PathError(f"{text} returned a {type(target).__name__}, not an nn.Module")
    elif options.arguments:
        raise PathError(f"{text} is a model already: --arguments are for a factory")
    if options.weights is not None:
        _load_weights(target, options.weights)
    return target, example


def trace_model(options: argparse.Namespace, model: nn.Module, example: Inputs | None) -> PathGraph:
    """Traces the model, without inputs if it starts with a linear layer. Errors name the options."""
    shapes, dtypes = options.input_shape, options.input_dtype
    if len(dtypes) not in (0, 1, len(shapes)):
        raise PathError(
            f"{len(dtypes)} --input-dtype for {len(shapes)} --input-shape: give one for all or for each"
        )
    dtypes = dtypes if len(dtypes) == len(shapes) else (dtypes or [torch.float32]) * len(shapes)
    inputs = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    try:
        return trace(model, inputs or example, batch_dim=options.batch_dim)
    except TraceError as error:
        text = str(error).replace("example_input", "--input-shape")
        if "indices" in text:
            text += "; for inputs that are indices: --input-dtype int64"
        raise TraceError(text) from error


def _read_model(file: Path, is_trusted: bool) -> tuple[Any, Inputs | None]:
    """Reads a whole model, and its inputs from an archive of torch.export. Both kinds of file are pickles."""
    if not is_trusted:
        raise PathError(
            f"reading a model from {file} can run code that is in it: give --trust if you trust it; a state "
            "dict is read without running code by --weights, with a TARGET that makes the model"
        )
    sys.path.insert(0, os.getcwd())
    try:
        if file.suffix == ".pt2":
            program = torch.export.load(file)
            return program.module(), Inputs(*program.example_inputs) if program.example_inputs else None
        model = torch.load(file, map_location="cpu", weights_only=False)
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError):  # says which file and why
            raise
        raise PathError(f"reading {file} raised {describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise PathError(f"{file} holds no model but {type(model).__name__}: give a state dict by --weights")
    return model, None


def import_target(text: str) -> Any:
    where, _, name = text.rpartition(":")
    if not where or not _is_dotted(name):
        raise PathError(f"expected package.module:name or path/to/file.py:name, got {text!r}")
    target: Any = _import_module(where)
    for part in name.split("."):
        if not hasattr(target, part):
            raise PathError(f"there is no {part!r} in {where}")
        target, where = getattr(target, part), f"{where}.{part}"
    return target


def _import_module(where: str) -> ModuleType:
    """Imports a dotted module or a file; a file in a package by its name there, for relative imports."""
    module, folder, file = where, Path.cwd(), None
    if where.endswith(".py"):
        file = Path(where).resolve()
        if not file.is_file():
            raise PathError(f"there is no file {where}")
        module, folder = file.stem, file.parent
        while (folder / "__init__.py").is_file():
            module, folder = f"{folder.name}.{module}", folder.parent
    elif not _is_dotted(where):
        raise PathError(f"{where!r} is neither a module (package.module) nor a file (path/to/file.py)")
    sys.path[:0] = [str(folder), os.getcwd()]
    try:
        return importlib.import_module(module) if file is None or "." in module else _execute_file(file)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise PathError(
                f"there is no module {error.name!r} in the current folder or among installed packages"
            ) from error
        raise PathError(f"importing {where} raised {describe(error)}") from error


def _execute_file(file: Path) -> ModuleType:
    """Imports a file that is in no package, under a name that hides no module of the same stem."""
    name = f"_pathsgd_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    """Returns an exception in the user's code as one line, with the place where it was raised."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    # A call with wrong arguments fails here, and a syntax error names its own place.
    if not frames or frames[-1].filename == __file__ or frames[-1].filename.startswith("<"):
        return text
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})"


def _load_weights(model: nn.Module, file: Path) -> None:
    """Loads a state dict, all of which has to fit, without running code."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if isinstance(error, OSError):  # says which file and why
            raise
        # A damaged file fails in as many ways as there are formats, and none of them is a bug here.
        raise PathError(
            f"{file} holds no state dict that can be read without running code ({type(error).__name__})"
        ) from error
    while isinstance(state, Mapping) and (inner := [state[k] for k in CHECKPOINT_KEYS if k in state]):
        state = inner[0]
    try:
        model.load_state_dict(state)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise PathError(f"the state dict in {file} does not fit the model: {reason[:MAX_REASON]}") from error


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _read_keywords(text: str) -> dict[str, Any]:
    try:
        keywords = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON: {error}") from error
    if not isinstance(keywords, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object of keyword arguments")
    return keywords


def _read_shape(text: str) -> tuple[int, ...]:
    """
    >>> _read_shape("1,3,32,32")
    (1, 3, 32, 32)
    """
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected sizes over 0, as in 1,3,32,32, not {text!r}")
    return tuple(map(int, sizes))


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"expected float32, int64, or another dtype of torch, not {name!r}")
    return dtype


def _read_axis(text: str) -> int | None:
    return None if text == "none" else int(text)
