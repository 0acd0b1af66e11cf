"""``pathsgd inspect``: the options, and the steps from a target to its tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd.console.machine import device_of
from pathsgd.errors import PathError, TraceError
from pathsgd.geometry.gamma import check_p
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import trace
from pathsgd.inspect.measure import measure
from pathsgd.inspect.show import as_json, text
from pathsgd.inspect.target import Target
from pathsgd.inspect.weights import load_weights, save_balanced

HELP = "your own model as the library sees it: its paths, their norm, its balance"
DESCRIPTION = """\
Shows a model as the library sees it:

  the graph    what pathsgd.trace finds: which parameters lie on paths and which fall back to gamma = 1, and
               where and why a region of paths ends
  log phi_p    the norm of all paths, as its natural logarithm, which is finite at any depth; one for each
               region. Rescaling does not change it
  mu_{p,inf}   the largest l_p norm of the weights into a unit, now and at its least, after pathsgd.balance.
               Their ratio says how far mu is from its least. It is 1 for a balanced network, and also where
               units that cannot be rescaled have the largest norm
  the layers   named as pathsgd.rescale names them. For each the number of its units, the norm of the weights
               into them, and their imbalance

The imbalance of a unit is -log2 of the scale that pathsgd.balance would multiply it by: the network is its
balanced equivalent with every unit rescaled by 2^imbalance. 0 is balanced; +5 means that the weights into the
unit are 32 times too large, and those out of it 32 times too small, for where it stands.

The model is not changed."""
EPILOG = """\
TARGET is package.module:name or path/to/file.py:name. The name may be dotted. It stands for a factory (called
with no arguments, or with those of --arguments), for a class, or for a model. The current folder can be
imported from. Importing a module runs the code in it, so inspect code you trust. Weights are read by
torch.load(weights_only=True), which runs none.

  pathsgd inspect mypkg.models:resnet --input-shape 1,3,32,32
  pathsgd inspect train.py:Net --arguments '{"width": 64}' --input-shape 1,784 --weights net.pt --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add("target", metavar="TARGET", help="the model: package.module:name or path/to/file.py:name")
    add(
        "--input-shape",
        action="append",
        default=[],
        metavar="N,N,...",
        help="of an input, batch included; once for each positional input. May be left out for an "
        "nn.Sequential that starts with a Linear",
    )
    add(
        "--input-dtype",
        action="append",
        default=[],
        metavar="DTYPE",
        help="float32, int64, ...: one for all inputs or one for each (default: that of the parameters)",
    )
    add("--batch-dim", default="0", metavar="N", help="the batch axis of the inputs, or none (default: 0)")
    add("--arguments", metavar="JSON", help="""keyword arguments of the factory, as in '{"width": 64}'""")
    add(
        "--weights",
        type=Path,
        metavar="FILE",
        help="load this state dict, or checkpoint that holds one, first",
    )
    add("--seed", type=int, default=0, metavar="N", help="for weights drawn at random (default: 0)")
    add("--device", metavar="DEVICE", help="cpu, cuda, ... (default: where the model is)")
    add("--p", type=float, default=2.0, metavar="P", help="of the norms, from 1 to inf (default: 2)")
    add(
        "--region",
        type=int,
        metavar="K",
        help="phi and the layers of one region only, as numbered in the graph",
    )
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--save-balanced", type=Path, metavar="FILE", help="write the state dict of the balanced model here")


def run(options: argparse.Namespace) -> int:
    check_p(options.p)
    arguments = _arguments(options.arguments)
    shapes = [_shape(given) for given in options.input_shape]
    batch_dim = _batch_dim(options.batch_dim)
    target = Target.parse(options.target)
    # What the user's code prints must not end up in the JSON.
    with target.importable(), contextlib.redirect_stdout(sys.stderr):
        torch.manual_seed(options.seed)
        model = target.model(arguments)
        if options.weights is not None:
            load_weights(model, options.weights)
        if options.device is not None:
            model = model.to(device_of(options.device))
        example = tuple(_inputs(model, shapes, options.input_dtype)) or None
        graph = _traced(model, example, batch_dim)
    if not options.json:
        print(graph, end="\n\n", flush=True)
    measures = measure(model, graph, options.p, options.region)
    if options.json:
        inputs = [
            {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")} for x in example or ()
        ]
        found = {"target": options.target, "inputs": inputs, **as_json(graph, measures)}
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        print(text(measures))
    if options.save_balanced is not None:
        save_balanced(model, graph, measures.scales, options.save_balanced)
        if not options.json:
            print(f"\nbalanced weights written to {options.save_balanced}")
    return 0


def _traced(model: nn.Module, example: tuple[Tensor, ...] | None, batch_dim: int | None) -> PathGraph:
    try:
        return trace(model, example, batch_dim=batch_dim)
    except TraceError as error:
        # The message speaks to a caller of trace; here the example has another name.
        text = str(error).replace("example_input", "--input-shape")
        if "indices" in text:
            text += "; for inputs that are indices: --input-dtype int64"
        raise TraceError(text) from error


def _arguments(given: str | None) -> dict[str, Any]:
    try:
        found = json.loads(given or "{}")
    except ValueError as error:
        raise PathError(f"--arguments {given} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise PathError(f'--arguments {given} is no JSON object of keyword arguments, as {{"width": 64}} is')
    return found


def _shape(given: str) -> tuple[int, ...]:
    """
    >>> _shape("1,3,32,32")
    (1, 3, 32, 32)
    """
    sizes = [size.strip() for size in given.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise PathError(f"Invalid --input-shape: {given!r} (expected sizes over 0, as in 1,3,32,32)")
    return tuple(map(int, sizes))


def _batch_dim(given: str) -> int | None:
    if given.lower() == "none":
        return None
    if not given.isdecimal():
        raise PathError(f"Invalid --batch-dim: {given!r} (expected an axis, or none)")
    return int(given)


def _inputs(model: nn.Module, shapes: list[tuple[int, ...]], names: list[str]) -> list[Tensor]:
    """Empty, so that no memory is touched: only shapes and dtypes matter to a trace."""
    if names and (not shapes or len(names) not in (1, len(shapes))):
        raise PathError(
            f"{len(names)} --input-dtype for {len(shapes)} --input-shape: give one for all or for each"
        )
    dtypes = [_dtype(name) for name in names]
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


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise PathError(
            f"Invalid --input-dtype: {name!r} (expected float32, int64, or another dtype of torch)"
        )
    return found
