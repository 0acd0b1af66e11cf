"""Steps of a chain recorded as CUDA graphs, so that launching one takes as long as launching a kernel.

A step launches two kernels or more for every layer, which from Python takes far longer than they run.
Training comes back to the same few places in memory: what is launched for gradients that lie where they once
lay is replayed. What changes from step to step (learning rates, counts of steps) is read from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TypeGuard

import torch
from torch import Tensor

from pathsgd.optim.fused.implementation import Launch, LayerTensors
from pathsgd.optim.rule import Rule

KEPT = 8
"""Recorded steps at most. Gradients lie in one or two places by turns."""


class RecordedSteps:
    """The steps of one chain on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._seen: dict[object, int] = {}
        self._numbers: Tensor | None = None
        self._values: list[float] = []

    def forget(self) -> None:
        """The numbers that kernels are launched with have changed."""
        self._graphs.clear()
        self._seen.clear()

    def run(self, layers: Sequence[LayerTensors], launch: Launch) -> None:
        """``launch(layers)``, or the replay of one just like it."""
        if torch.cuda.is_current_stream_capturing():
            launch(layers)  # recorded by somebody else
            return
        self._write([number for layer in layers for number in _changing(layer)])
        key = _key(layers)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        if len(self._seen) > 16 * KEPT:
            self._seen.clear()
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen == 1 or len(self._graphs) == KEPT:
            launch(layers)  # as somebody may who records whole steps after one of warming up
        elif seen == 2:
            launch(self._reading(layers))  # which compiles what is to be recorded
        else:
            reading = self._reading(layers)
            self._graphs[key] = graph = _recorded(lambda: launch(reading), self.device)
            graph.replay()

    def _write(self, numbers: list[float]) -> None:
        """Brings the numbers to the device, if they are not what they were."""
        if self._numbers is None or self._values != numbers:
            # Sixteen bytes for each: a kernel is compiled for how its arguments are aligned.
            values = torch.tensor(numbers, dtype=torch.float32).repeat_interleave(4).view(-1, 4)
            if self._numbers is None or len(self._numbers) != len(values):
                self._numbers = torch.empty_like(values, device=self.device)
                self.forget()
            self._numbers.copy_(values)
            self._values = numbers

    def _reading(self, layers: Sequence[LayerTensors]) -> list[LayerTensors]:
        """The same with numbers that are on the device."""
        assert self._numbers is not None
        places = iter(self._numbers[:, 0])

        def placed(rule: Rule) -> Rule:
            changed = {name: next(places) for name in CHANGING if not _on_device(getattr(rule, name))}
            return replace(rule, **changed)

        return [
            replace(layer, rule=placed(layer.rule), bias_rule=placed(layer.bias_rule)) for layer in layers
        ]


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


def _recorded(launch: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Without the clearing of caches that torch.cuda.graph does: nothing is allocated here."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Other threads may go on allocating: those of a data loader do.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph
