"""One network of the table: how many weights have a symmetry, and whether the library keeps its promises."""

from __future__ import annotations

import contextlib
import copy
import re
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import pathsgd

# Private: the table counts what `print(graph)` does.
from pathsgd.graph.protection import find_causes, has_symmetry
from pathsgd.graph.unit_classes import unit_classes_of

from .models import build

STEPS = 5


@dataclass
class Row:
    """What was found of one network. ``None``: it was not reached."""

    name: str
    error: str = ""
    """What went wrong first, in the words of the error."""
    weights: int = 0
    one_side: float | None = None
    both_sides: float | None = None
    units: int | None = None
    seconds: float | None = None
    """Of one core, to trace the model and to find its units."""
    unbalanced: float | None = None
    """Relative change of the function."""
    balanced: float | None = None
    agree: float | None = None
    """Largest relative difference of a parameter, if the network is balanced and if its rescaled copy is."""
    steps: float | None = None
    """Difference of the functions after training, relative to how far training moved them."""
    behind: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    total_seconds: float = 0.0


class TooSlow(BaseException):
    """Not an Exception: what is measured must not catch it."""


def measure(name: str, limit_s: float = 120) -> Row:
    """Measures all columns, up to the first error."""
    row, start = Row(name), time.perf_counter()
    try:
        with _time_limit(limit_s):
            _measure_into(row)
    except TooSlow:
        row.error = f"stopped after {limit_s} s"
    except Exception as error:
        row.error = f"{type(error).__name__}: {_first_line(error)}"
    row.total_seconds = time.perf_counter() - start
    return row


def _measure_into(row: Row) -> None:
    model, inputs = build(row.name)
    row.weights = sum(p.numel() for p in model.parameters())
    original, rescaled, *starts = [copy.deepcopy(model) for _ in range(4)]
    with torch.no_grad():
        compute_outputs(model, inputs)  # an error here is not ours
    start = time.process_time()
    graph = pathsgd.trace(model, inputs)
    units = unit_classes_of(graph)
    row.seconds = time.process_time() - start

    sides = [has_symmetry(tuple(p.shape), units, name) for name, p in model.named_parameters()]
    row.one_side = sum(int((head | tail).sum()) for head, tail in sides) / row.weights
    row.both_sides = sum(int((head & tail).sum()) for head, tail in sides) / row.weights
    row.units = len(units.free)
    row.behind, row.before = map(dict, find_causes(graph, units))

    # Each unit is hit three times on average, so that hardly one is left as it is.
    generator = torch.Generator().manual_seed(1)
    pathsgd.unbalance(rescaled, graph, units=3 * row.units, factor=1.0, generator=generator)
    starts[1].load_state_dict(rescaled.state_dict())
    row.unbalanced = change(rescaled, model, inputs)
    pathsgd.balance(original, graph)
    row.balanced = change(original, model, inputs)
    pathsgd.balance(rescaled, graph)
    row.agree = largest_difference(rescaled, original)
    row.steps = steps_apart(*starts, graph, inputs)


def compute_outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """All tensors of floats that it returns."""
    model.train().eval()  # what a module keeps for the next call in eval mode may be of other weights
    with InDouble() if next(model.parameters()).dtype == torch.float64 else contextlib.nullcontext():
        returned = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    return [x for x in _tensors_in(returned) if x.is_floating_point()]


class InDouble(TorchFunctionMode):
    """fp64 in place of fp32, which many models cast to in norms and softmaxes, whatever they are given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    )
    return [x for each in inner for x in _tensors_in(each)]


@torch.no_grad()
def change(model: nn.Module, other: nn.Module, inputs: Any) -> float:
    """The largest difference of an output, relative to its norm."""
    pairs = zip(compute_outputs(model, inputs), compute_outputs(other, inputs), strict=True)
    return max(_relative(x, y) for x, y in pairs)


@torch.no_grad()
def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of a parameter, relative to its norm."""
    return max(_relative(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def _relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm().clamp(min=1e-30))


def steps_apart(
    model: nn.Module, rescaled: nn.Module, graph: pathsgd.PathGraph, inputs: Any, steps: int = STEPS
) -> float:
    """Trains both by BalancedMuon, on the same batch. The difference of their outputs, relative to how far
    training moved them."""
    before = _join(model, inputs).detach()
    after = []
    for each in (model, rescaled):
        optimizer = pathsgd.BalancedMuon(each, graph)
        for _ in range(steps):
            optimizer.zero_grad()
            outputs = compute_outputs(each, inputs)
            sum((y - _targets(y)).square().mean() for y in outputs if y.requires_grad).backward()
            optimizer.step()
        after.append(_join(each, inputs).detach())
    return float((after[1] - after[0]).norm() / (after[0] - before).norm())


def _targets(y: Tensor) -> Tensor:
    return torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()


def _join(model: nn.Module, inputs: Any) -> Tensor:
    """All outputs in one vector, each of about the same weight."""
    return torch.cat([y.flatten() for y in compute_outputs(model, inputs)])


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, if a callback swallows the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return re.sub(r"0x[0-9a-f]+", "0x...", lines[0])
