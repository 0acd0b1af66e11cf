"""``pathsgd bench``: times a training step of a user's model with several optimizers."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd import BalancedMuon, PathError, PathGraph, PathNormalized, PathSGD
from pathsgd.cli.inspect import align
from pathsgd.cli.timing import LR, Step, capture, device_name, median_us
from pathsgd.cli.user_model import load_model, make_inputs, make_parser, trace_model

Make = Callable[[nn.Module, PathGraph], Any]
ABOUT = """\
Times the whole training step of a model (forward, backward, optimizer) and the optimizer's step alone.

Every optimizer trains a copy of the model on one random batch at a rate so small that no weight changes; they
are taken in turn, and medians are printed. The ratio is to torch's optimizer of the same kind, fused if it
can be, and of BalancedMuon to AdamW. The loss is the mean square of all outputs.

examples:
  pathsgd bench mypkg.models:resnet --input-shape 32,3,32,32
  pathsgd bench train.py:GPT --input-shape 8,1024 --input-dtype int64 --device cuda --autocast --cuda-graph
"""


def _adamw_options(model: nn.Module) -> dict[str, Any]:
    return {"lr": LR, "fused": True, "capturable": next(model.parameters()).is_cuda}


METHODS: dict[str, tuple[str, Make]] = {
    "SGD": ("SGD", lambda m, g: torch.optim.SGD(m.parameters(), LR, fused=True)),
    "PathSGD": ("SGD", lambda m, g: PathSGD(m, g, lr=LR)),
    "AdamW": ("AdamW", lambda m, g: torch.optim.AdamW(m.parameters(), **_adamw_options(m))),
    "PathNormalized(AdamW)": (
        "AdamW", lambda m, g: PathNormalized(torch.optim.AdamW, m, g, **_adamw_options(m))
    ),
    "BalancedMuon": ("AdamW", lambda m, g: BalancedMuon(m, g, LR)),
}  # fmt: skip
"""Name -> (torch's optimizer of the same kind, what makes it)."""


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("bench", ABOUT)
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", default=[],
                        help=f"which to time: {', '.join(METHODS)}")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--autocast", action="store_true", help="forward pass in bf16")
    parser.add_argument("--cuda-graph", action="store_true", help="also time the step as one CUDA graph")
    options = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):
        model = load_model(options)
        inputs = _fill(make_inputs(options, model), model)
        if not inputs:
            raise PathError("bench needs --input-shape, once for each input")
        graph = trace_model(options, model, inputs)
        device = inputs[0].device
        if options.cuda_graph and device.type != "cuda":
            raise PathError("--cuda-graph needs --device cuda")
        steps: dict[str, tuple[Step, Step]] = {}
        for name in options.methods or METHODS:
            steps[name] = _make_steps(copy.deepcopy(model), METHODS[name][1], graph, inputs, options.autocast)
        train = {name: whole for name, (whole, _) in steps.items()}
        times = {"step": median_us(train, options.seconds, device)}
        alone = {name: step for name, (_, step) in steps.items()}
        times["optimizer"] = median_us(alone, options.seconds / 4, device)
        if options.cuda_graph:  # last: gradients lie in the memory of the graphs from here on
            captured = {name: capture(step) for name, step in train.items()}
            times["graph"] = median_us(captured, options.seconds, device)
    if options.json:
        head = {"target": options.target, "machine": device_name(device), "torch": torch.__version__}
        print(json.dumps({**head, "microseconds": times}, indent=1))
    else:
        print("\n".join(_table(times)))
    return 0


def _fill(inputs: Sequence[Tensor], model: nn.Module) -> tuple[Tensor, ...]:
    """Returns random inputs; indices fit every embedding."""
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    return tuple(
        torch.randn_like(x) if x.is_floating_point() else x.random_(0, min(sizes, default=2)) for x in inputs
    )


def _make_steps(
    model: nn.Module, make: Make, graph: PathGraph, inputs: Sequence[Tensor], autocast: bool
) -> tuple[Step, Step]:
    """Returns the whole training step and the optimizer's."""
    optimizer = make(model, graph)

    def train() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=autocast):
            outputs = model(*inputs)
        tensors = [x for x in _tensors_in(outputs) if x.requires_grad]
        torch.stack([x.float().square().mean() for x in tensors]).sum().backward()
        optimizer.step()

    train()
    return train, optimizer.step


def _tensors_in(outputs: Any) -> list[Tensor]:
    """Returns the tensors of tuples, lists and dicts, as models of transformers return them."""
    if isinstance(outputs, Tensor):
        return [outputs]
    values = outputs.values() if hasattr(outputs, "values") else outputs
    return [x for value in values for x in _tensors_in(value)] if hasattr(values, "__iter__") else []


def _table(times: dict[str, dict[str, float]]) -> list[str]:
    columns = ["method", "step, ms", "ratio", "optimizer, ms", *(["graph, ms", "ratio"] * ("graph" in times))]
    rows = [columns]
    for name in times["step"]:
        row = [name]
        for way, by_name in times.items():
            beside = next((other for other in (METHODS[name][0], "AdamW") if other in by_name), name)
            ratio = f"{by_name[name] / by_name[beside]:.2f} of {beside}"
            row += [f"{by_name[name] / 1e3:.3f}", *([ratio] * (way != "optimizer"))]
        rows.append(row)
    return align(rows, "<" + ">" * (len(columns) - 1), rule=True)
