"""Which parameters of a step go to a fused implementation, and to which; the rest is for the reference."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from pathsgd.geometry.gamma import Gammas
from pathsgd.graph.chains import Chain, Layer, chains
from pathsgd.graph.path_graph import PathGraph
from pathsgd.optim.fused.blocked import Blocked
from pathsgd.optim.fused.chain_step import ChainStep
from pathsgd.optim.fused.implementation import Implementation, LayerTensors
from pathsgd.optim.rule import Rule, State

Choice = Literal["auto", "reference", "blocked", "triton"]
Kind = Literal["blocked", "triton"]
LOW_PRECISION = (torch.float16, torch.bfloat16)
POWERS = (1, 2, 4)
"""The p whose powers and roots are products and square roots."""


def check_implementation(implementation: object) -> Choice:
    if implementation not in get_args(Choice):
        raise ValueError(
            f"Invalid implementation: {implementation!r} (one of {', '.join(map(repr, get_args(Choice)))})"
        )
    if implementation == "triton" and not has_triton():
        raise ValueError("implementation='triton' needs the package triton; use 'auto'")
    return implementation  # type: ignore[return-value]


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class Ready(NamedTuple):
    """A chain that can be moved."""

    chain: ChainStep
    layers: list[LayerTensors]
    parameters: list[Tensor]

    def step(self) -> None:
        self.chain.step(self.layers, self.parameters)


class Dispatch:
    """The chains of a model, each with the gammas it carries from step to step."""

    def __init__(self, graph: PathGraph, model: nn.Module, choice: Choice) -> None:
        self.choice = choice
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.chains = chains(graph)
        self.last_kinds: dict[int, Kind] = {}
        """Which implementation the last step gave to each parameter, by id."""
        self._chain_steps: dict[tuple[object, ...], ChainStep] = {}

    def ready(
        self,
        rules: Mapping[int, Rule],
        state_of: Callable[[Tensor], State],
        measure: Callable[[float], Gammas],
    ) -> list[Ready]:
        """The chains all of whose parameters have a rule (by id) compatible with the others', each with the
        gammas of its weights. ``measure`` gives those at one p to a chain that does not carry them. Nothing
        is written yet."""
        found = []
        self.last_kinds = {}
        for chain in self.chains:
            names = [n for layer in chain for n in (layer.weight, layer.bias) if n is not None]
            tensors = [self.parameters[name] for name in names]
            own = [rules[id(t)] for t in tensors if id(t) in rules]
            if len(own) < len(tensors) or own[0].p not in POWERS:
                continue
            if not all(rule.is_compatible(own[0]) for rule in own):
                continue
            layers = [self._tensors(layer, rules, state_of) for layer in chain]
            kind = choose(self.choice, layers)
            if kind is None:
                continue
            step = self._chain_step(chain, layers, kind)
            if not step.carries(tensors) and not step.start(measure(own[0].p), layers, tensors):
                continue
            found.append(Ready(step, layers, tensors))
            self.last_kinds.update(dict.fromkeys(map(id, tensors), kind))
        return found

    def forget(self) -> None:
        """Drops the carried gammas: the weights were written in a way that does not show."""
        for step in self._chain_steps.values():
            step.forget()

    def _chain_step(self, chain: Chain, layers: list[LayerTensors], kind: Kind) -> ChainStep:
        weight, p = layers[0].weight, int(layers[0].rule.p)
        key = (chain, p, kind, weight.device, weight.dtype)
        if key not in self._chain_steps:
            self._chain_steps[key] = ChainStep(chain, make(kind, chain, p, weight))
        return self._chain_steps[key]

    def _tensors(
        self, layer: Layer, rules: Mapping[int, Rule], state_of: Callable[[Tensor], State]
    ) -> LayerTensors:
        weight = self.parameters[layer.weight]
        bias = None if layer.bias is None else self.parameters[layer.bias]
        rule = rules[id(weight)]
        bias_rule = rule if bias is None else rules[id(bias)]
        assert weight.grad is not None
        state = state_of if rule.state_count else lambda _: ()
        if bias is None:
            return LayerTensors(rule, bias_rule, weight, weight.grad, state(weight))
        return LayerTensors(
            rule, bias_rule, weight, weight.grad, state(weight), bias, bias.grad, state(bias),
        )  # fmt: skip


def choose(choice: Choice, layers: Sequence[LayerTensors]) -> Kind | None:
    """The implementation for these layers; None for the reference, which takes any."""
    if choice == "reference" or not _alike(layers):
        return None
    first = layers[0].weight
    if choice == "triton" and not (first.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(
            f"implementation='triton' needs parameters on a GPU, not on {first.device}; use 'auto'"
        )
    if choice == "triton" or (choice == "auto" and first.is_cuda and has_triton()):
        biases = [t for layer in layers for t in (layer.bias, layer.bias_grad) if t is not None]
        fits = first.dtype in (torch.float32, *LOW_PRECISION) and all(t.is_contiguous() for t in biases)
        return "triton" if fits else None
    return "blocked" if first.device.type == "cpu" else None


def make(kind: Kind, chain: Chain, p: int, like: Tensor) -> Implementation:
    if kind == "triton":
        from pathsgd.optim.fused.gpu.triton_chain import TritonChain

        return TritonChain(chain, p, like.device)
    return Blocked(p, torch.float32 if like.dtype in LOW_PRECISION else like.dtype)


def _alike(layers: Sequence[LayerTensors]) -> bool:
    """One device, one dtype, nothing sparse or complex."""
    first = layers[0].weight
    device, dtype = first.device, first.dtype
    for layer in layers:
        for t in (layer.weight, layer.weight_grad, layer.bias, layer.bias_grad):
            if t is not None and (t.dtype != dtype or t.device != device or t.layout != torch.strided):
                return False
        for s in (*layer.weight_state, *layer.bias_state):
            if s.device != device or not s.is_contiguous():
                return False
    return first.is_floating_point()
