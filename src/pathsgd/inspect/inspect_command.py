"""``pathsgd inspect``: the options, and the steps from a user's model to its tables."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from pathsgd import Imbalance, PathError, PathGraph, TraceError, imbalance, trace
from pathsgd.console.command_line import parse
from pathsgd.console.devices import find_device
from pathsgd.console.user_code import Reference
from pathsgd.inspect.model_tables import format_tables, to_json
from pathsgd.inspect.weights import load_weights, save_balanced


@dataclass(frozen=True)
class Inspect:
    """Prints a model as the library sees it. The model is not changed.

    the graph    what pathsgd.trace finds: which parameters lie on paths and which fall back to gamma = 1,
                 and where and why a region of paths ends
    log phi_p    the natural logarithm of the path norm, finite at any depth; one for each region. Rescaling
                 does not change it
    mu_{p,inf}   the largest l_p norm of the weights into a unit, now and after pathsgd.balance(q=inf). Their
                 ratio is 1 for a balanced network, and where units that cannot be rescaled have the largest
                 norm
    the layers   named as pathsgd.rescale names them: the number of units, the norm of the weights into them,
                 and their imbalance

    The imbalance of a unit is -log2 of the factor that it would multiply it by: the network is its balanced
    equivalent with every unit rescaled by 2^imbalance. 0 is balanced; +5 means that the weights into the unit
    are 32 times too large, and those out of it 32 times too small.

    Importing a module runs the code in it, so inspect code you trust. Weights are read by
    torch.load(weights_only=True), which runs none.

    examples:
      pathsgd inspect mypkg.models:resnet --input-shape 1,3,32,32
      pathsgd inspect train.py:Net --arguments '{"width": 64}' --input-shape 1,784 --weights net.pt --json
    """

    target: tyro.conf.Positional[str]
    """package.module:name or path/to/file.py:name of a model, or of a class or function that makes one. The
    name may be dotted, and the current folder can be imported from."""
    input_shape: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Sizes of an input, batch included: 1,3,32,32. Once for each positional input; may be left out for an
    nn.Sequential that starts with a Linear."""
    input_dtype: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """float32, int64, ...: one for all inputs or one for each; by default that of the parameters."""
    batch_dim: str = "0"
    """The batch axis of the inputs, or none."""
    arguments: str = "{}"
    """Keyword arguments of the class or function, as JSON: '{"width": 64}'."""
    weights: Path | None = None
    """Load this state dict, or a checkpoint that holds one, first."""
    seed: int = 0
    """Seed of weights that are drawn at random."""
    device: str | None = None
    """cpu, cuda, ...; by default where the model is."""
    p: float = 2.0
    """Order of the norms, from 1 to inf."""
    region: int | None = None
    """Phi and the layers of one region only, as numbered in the graph."""
    json: bool = False
    """Print JSON instead of tables."""
    save_balanced: Path | None = None
    """Write the state dict of the balanced model, that of least mu_{p,inf}, to this file."""


def main(arguments: Sequence[str]) -> int:
    options = parse(Inspect, arguments, "inspect")
    keywords = _read_keywords(options.arguments)
    shapes = [_read_shape(text) for text in options.input_shape]
    batch_dim = _read_batch_dim(options.batch_dim)
    reference = Reference.parse(options.target)
    # What the user's code prints must not end up in the JSON.
    with reference.importable(), contextlib.redirect_stdout(sys.stderr):
        torch.manual_seed(options.seed)
        model = reference.make_model(**keywords)
        if options.weights is not None:
            load_weights(model, options.weights)
        if options.device is not None:
            model = model.to(find_device(options.device))
        example = tuple(_make_inputs(model, shapes, options.input_dtype)) or None
        graph = _trace(model, example, batch_dim)
    if not options.json:
        print(graph, end="\n\n", flush=True)
    found = imbalance(model, graph, options.p, math.inf)
    if options.region is not None:
        found = _select_region(found, options.region)
    if options.json:
        inputs = [
            {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")} for x in example or ()
        ]
        report = {"target": options.target, "inputs": inputs, **to_json(graph, found)}
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        print(format_tables(found))
    if options.save_balanced is not None:
        save_balanced(model, graph, options.p, options.save_balanced)
        if not options.json:
            print(f"\nbalanced weights written to {options.save_balanced}")
    return 0


def _select_region(found: Imbalance, region: int) -> Imbalance:
    """phi and the layers of one region. mu is always of the whole network."""
    if region not in found.log_phi:
        raise PathError(f"there is no region {region}; the graph has {len(found.log_phi)}")
    layers = tuple(layer for layer in found.layers if layer.region == region)
    return replace(found, log_phi={region: found.log_phi[region]}, layers=layers)


def _trace(model: nn.Module, example: tuple[Tensor, ...] | None, batch_dim: int | None) -> PathGraph:
    try:
        return trace(model, example, batch_dim=batch_dim)
    except TraceError as error:
        # The message speaks to a caller of trace; here the example has another name.
        text = str(error).replace("example_input", "--input-shape")
        if "indices" in text:
            text += "; for inputs that are indices: --input-dtype int64"
        raise TraceError(text) from error


def _read_keywords(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise PathError(f"--arguments {text} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise PathError(f'--arguments {text} is no JSON object of keyword arguments, as {{"width": 64}} is')
    return found


def _read_shape(text: str) -> tuple[int, ...]:
    """
    >>> _read_shape("1,3,32,32")
    (1, 3, 32, 32)
    """
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise PathError(f"Invalid --input-shape: {text!r} (expected sizes over 0, as in 1,3,32,32)")
    return tuple(map(int, sizes))


def _read_batch_dim(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if not text.isdecimal():
        raise PathError(f"Invalid --batch-dim: {text!r} (expected an axis, or none)")
    return int(text)


def _make_inputs(model: nn.Module, shapes: list[tuple[int, ...]], names: Sequence[str]) -> list[Tensor]:
    """Empty tensors, which touch no memory: only shapes and dtypes matter to a trace."""
    if names and (not shapes or len(names) not in (1, len(shapes))):
        raise PathError(
            f"{len(names)} --input-dtype for {len(shapes)} --input-shape: give one for all or for each"
        )
    dtypes = [_read_dtype(name) for name in names]
    device = next((tensor.device for tensor in model.parameters()), None)
    if not dtypes:
        floats = (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
        dtypes = [next(floats, torch.get_default_dtype())]
    if len(dtypes) == 1:
        dtypes *= len(shapes)
    try:
        return [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
    except (RuntimeError, TypeError) as error:
        raise PathError(f"inputs of shape {shapes} do not fit in memory") from error


def _read_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise PathError(
            f"Invalid --input-dtype: {name!r} (expected float32, int64, or another dtype of torch)"
        )
    return found
