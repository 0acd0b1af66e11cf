"""Which parameters of a step go through the kernels, and which through the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from pathsgd.geometry.gamma import Gammas
from pathsgd.graph.chains import Chain, Layer, chains
from pathsgd.graph.path_graph import PathGraph
from pathsgd.optim.fused.chain_step import ChainStep
from pathsgd.optim.fused.choice import POWERS, Choice, implementation_for, make
from pathsgd.optim.fused.implementation import LayerTensors
from pathsgd.optim.rule import Rule, State


class Ready(NamedTuple):
    """A chain that can be moved."""

    chain: ChainStep
    layers: list[LayerTensors]
    parameters: list[Tensor]

    def step(self) -> None:
        self.chain.step(self.layers, self.parameters)


class Plan:
    """The chains of a model, with what each carries from step to step."""

    def __init__(self, graph: PathGraph, model: nn.Module, choice: Choice) -> None:
        self.choice = choice
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.chains = chains(graph)
        self._steps: dict[tuple[object, ...], ChainStep] = {}

    def ready(
        self,
        rules: Mapping[int, Rule],
        state_of: Callable[[Tensor], State],
        measure: Callable[[float], Gammas],
    ) -> list[Ready]:
        """The chains all of whose parameters have a rule (by their ids) that goes with the others', each with
        gammas for its weights as they stand. ``measure`` gives those at one p for a chain that does not carry
        them; nothing is moved yet."""
        found = []
        for chain in self.chains:
            names = [n for layer in chain for n in (layer.weight, layer.bias) if n is not None]
            tensors = [self.parameters[name] for name in names]
            own = [rules[id(t)] for t in tensors if id(t) in rules]
            if len(own) < len(tensors) or own[0].p not in POWERS:
                continue
            if not all(rule.goes_with(own[0]) for rule in own):
                continue
            layers = [self._tensors(layer, rules, state_of) for layer in chain]
            step = self._step_for(chain, layers)
            if step is None:
                continue
            if not step.carries(tensors) and not step.measured(measure(own[0].p), tensors):
                continue  # for the reference
            found.append(Ready(step, layers, tensors))
        return found

    def forget(self) -> None:
        """The weights were written in a way that does not show."""
        for step in self._steps.values():
            step.forget()

    def _step_for(self, chain: Chain, layers: list[LayerTensors]) -> ChainStep | None:
        kind = implementation_for(self.choice, layers)
        if kind is None:
            return None
        weight, p = layers[0].weight, int(layers[0].rule.p)
        key = (chain, p, kind, weight.device, weight.dtype)
        if key not in self._steps:
            self._steps[key] = ChainStep(chain, make(kind, chain, p, weight))
        return self._steps[key]

    def _tensors(
        self, layer: Layer, rules: Mapping[int, Rule], state_of: Callable[[Tensor], State]
    ) -> LayerTensors:
        weight = self.parameters[layer.weight]
        bias = None if layer.bias is None else self.parameters[layer.bias]
        rule = rules[id(weight)]
        bias_rule = rule if bias is None else rules[id(bias)]
        assert weight.grad is not None
        state = state_of if rule.states else lambda _: ()
        if bias is None:
            return LayerTensors(rule, bias_rule, weight.detach(), weight.grad, state(weight))
        return LayerTensors(
            rule, bias_rule, weight.detach(), weight.grad, state(weight), bias.detach(), bias.grad,
            state(bias),
        )  # fmt: skip
