"""Steps of a chain captured as CUDA graphs, so that launching one takes as long as launching a kernel.

A step launches two kernels or more for every layer, which from Python takes far longer than they run.
Training comes back to the same few addresses: a step whose gradients lie where those of an earlier one lay is
replayed. What changes from step to step (learning rates, step counts) is read from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TypeGuard

import torch
from torch import Tensor

from pathsgd.geometry.cuda_graph import ERROR_MODE, CUDAGraph
from pathsgd.optim.fused.implementation import Launch, LayerTensors
from pathsgd.optim.rule import Rule

MOST_GRAPHS = 8
"""Gradients usually lie in one place, or in two by turns."""


class RecordedSteps:
    """The steps of one chain on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[object, CUDAGraph] = {}
        self._seen: dict[object, int] = {}
        self._numbers: Tensor | None = None
        self._values: list[float] = []

    def clear(self) -> None:
        """Drops the graphs: numbers that kernels were launched with have changed."""
        self._graphs.clear()
        self._seen.clear()

    def run(self, layers: Sequence[LayerTensors], launch: Launch) -> None:
        """``launch(layers)``, or the replay of one just like it."""
        if torch.cuda.is_current_stream_capturing():
            launch(layers)  # into the graph that the user captures
            return
        self._write([number for layer in layers for number in _changing(layer)])
        key = _key(layers)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        if len(self._seen) > 16 * MOST_GRAPHS:
            self._seen.clear()
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen == 1 or len(self._graphs) == MOST_GRAPHS:
            launch(layers)  # the user may capture whole steps after one to warm up
        elif seen == 2:
            launch(self._reading(layers))  # compiles the kernels that are to be captured
        else:
            reading = self._reading(layers)
            self._graphs[key] = graph = capture_launches(lambda: launch(reading), self.device)
            graph.replay()

    def _write(self, numbers: list[float]) -> None:
        """Copies the numbers to the device, if they have changed."""
        if self._numbers is None or self._values != numbers:
            # Sixteen bytes for each: a kernel is compiled for how its arguments are aligned.
            values = torch.tensor(numbers, dtype=torch.float32).repeat_interleave(4).view(-1, 4)
            if self._numbers is None or len(self._numbers) != len(values):
                self._numbers = torch.empty_like(values, device=self.device)
                self.clear()
            self._numbers.copy_(values)
            self._values = numbers

    def _reading(self, layers: Sequence[LayerTensors]) -> list[LayerTensors]:
        """The same layers with rules whose numbers are read from the device."""
        assert self._numbers is not None
        places = iter(self._numbers[:, 0])

        def place(rule: Rule) -> Rule:
            changed = {name: next(places) for name in CHANGING if not _on_device(getattr(rule, name))}
            return replace(rule, **changed)

        return [replace(layer, rule=place(layer.rule), bias_rule=place(layer.bias_rule)) for layer in layers]


CHANGING = ("lr", "step")
"""Of a rule, from step to step."""
_CONSTANT = tuple(field.name for field in fields(Rule) if field.name not in CHANGING)


def _on_device(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _changing(layer: LayerTensors) -> Iterator[float]:
    for rule in (layer.rule, layer.bias_rule):
        for name in CHANGING:
            value = getattr(rule, name)
            if not _on_device(value):
                yield float(value)


def _key(layers: Sequence[LayerTensors]) -> object:
    """All that a launch depends on but the numbers on the device."""
    rules: dict[int, tuple[object, ...]] = {}  # often one for all
    places: list[object] = []
    for layer in layers:
        for rule in (layer.rule, layer.bias_rule):
            if id(rule) not in rules:
                rules[id(rule)] = _constants(rule)
            places.append(rules[id(rule)])
        for t in (layer.weight, layer.weight_grad, layer.bias, layer.bias_grad):
            places.append(None if t is None else (t.data_ptr(), t.stride(), t.dtype))
        places += [(t.data_ptr(), t.dtype) for t in (*layer.weight_state, *layer.bias_state)]
    return tuple(places)


def _constants(rule: Rule) -> tuple[object, ...]:
    changing = (getattr(rule, name) for name in CHANGING)
    return (
        *(getattr(rule, name) for name in _CONSTANT),
        *(value.data_ptr() if _on_device(value) else None for value in changing),
    )


def capture_launches(launch: Callable[[], None], device: torch.device) -> CUDAGraph:
    """A CUDA graph of the launches, without the clearing of caches that torch.cuda.graph does: nothing is
    allocated here."""
    graph, stream = CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=ERROR_MODE)
        try:
            launch()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph
