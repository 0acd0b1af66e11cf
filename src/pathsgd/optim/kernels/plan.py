"""Which parameters of a step go through the kernels, and which through the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pathsgd.geometry.scales import Scales
from pathsgd.graph.chains import Chain, Layer, chains
from pathsgd.graph.path_graph import PathGraph
from pathsgd.optim.kernels.chain import ChainStep
from pathsgd.optim.kernels.choice import POWERS, Choice, implementation_for, make
from pathsgd.optim.kernels.layer import LayerTensors, Rule


class Ready(NamedTuple):
    """A chain that can be moved."""

    chain: ChainStep
    layers: list[LayerTensors]
    parameters: list[Tensor]

    def step(self, rule: Rule) -> None:
        self.chain.step(self.layers, self.parameters, rule)


class Plan:
    """The chains of a model, with what each carries from step to step."""

    def __init__(self, graph: PathGraph, parameters: Mapping[str, Tensor], choice: Choice) -> None:
        self.choice = choice
        self.parameters = parameters
        self.chains = chains(graph)
        self._steps: dict[tuple[object, ...], ChainStep] = {}

    def ready(
        self,
        params: Sequence[Tensor],
        momentum_of: Callable[[Tensor], Tensor | None],
        rule: Rule,
        measure: Callable[[], Scales],
    ) -> list[Ready]:
        """The chains all of whose parameters are among ``params``, each with gammas for its weights as they
        stand. ``measure`` gives those for a chain that does not carry them; nothing is moved yet."""
        given = {id(p) for p in params}
        found = []
        for chain in self.chains:
            names = [n for layer in chain for n in (layer.weight, layer.bias) if n is not None]
            tensors = [self.parameters[name] for name in names]
            if rule.p not in POWERS or not all(id(t) in given for t in tensors):
                continue
            layers = [self._tensors(layer, momentum_of) for layer in chain]
            step = self._step_for(chain, layers, rule)
            if step is None:
                continue
            if not step.carries(tensors):
                scales = measure()
                if scales.exponents:  # beyond plain floats: for the reference
                    step.forget()
                    continue
                step.measured(scales, tensors)
            found.append(Ready(step, layers, tensors))
        return found

    def forget(self) -> None:
        """The weights were written in a way that does not show."""
        for step in self._steps.values():
            step.forget()

    def _step_for(self, chain: Chain, layers: list[LayerTensors], rule: Rule) -> ChainStep | None:
        kind = implementation_for(self.choice, layers)
        if kind is None:
            return None
        weight = layers[0].weight
        key = (chain, rule.p, kind, weight.device, weight.dtype)
        if key not in self._steps:
            self._steps[key] = ChainStep(chain, make(kind, chain, int(rule.p), weight))
        return self._steps[key]

    def _tensors(self, layer: Layer, momentum_of: Callable[[Tensor], Tensor | None]) -> LayerTensors:
        def of(name: str | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
            if name is None:
                return None, None, None
            parameter = self.parameters[name]
            return parameter.detach(), parameter.grad, momentum_of(parameter)

        weight, weight_grad, weight_momentum = of(layer.weight)
        assert weight is not None
        assert weight_grad is not None
        return LayerTensors(weight, weight_grad, weight_momentum, *of(layer.bias))
