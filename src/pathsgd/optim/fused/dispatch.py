"""Which parameters of a step go to a fused implementation, and to which; the rest is for the reference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from pathsgd._torch import is_capturing
from pathsgd.geometry.devices import has_triton
from pathsgd.graph.chains import Chain, Layer, chains
from pathsgd.graph.path_graph import PathGraph
from pathsgd.optim.capture_from_start import CapturedCopies
from pathsgd.optim.fused.blocked import Blocked
from pathsgd.optim.fused.blocked_tensors import BlockedTensors, Moved
from pathsgd.optim.fused.chain_step import ChainStep
from pathsgd.optim.fused.implementation import Implementation, LayerTensors, OptimizerState
from pathsgd.optim.gamma_cache import GammaCache
from pathsgd.optim.rule import GroupRule, Rule

if TYPE_CHECKING:
    from pathsgd.optim.fused.gpu.multi_tensor import MultiTensorStep

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


class Ready(Protocol):
    """Parameters that can be moved."""

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    def step(self) -> None: ...


class ReadyChain(NamedTuple):
    chain: ChainStep
    layers: list[LayerTensors]
    parameters: list[Tensor]

    def step(self) -> None:
        self.chain.step(self.layers, self.parameters)


class ReadyTensors(NamedTuple):
    tensors: MultiTensorStep
    groups: list[GroupRule]

    @property
    def parameters(self) -> list[Tensor]:
        return self.tensors.parameters

    def step(self) -> None:
        self.tensors.step(self.groups)


class Dispatch:
    """The fused implementations of a model: its chains, each with the gammas it carries from step to step,
    and what is moved by gammas that were measured."""

    def __init__(self, graph: PathGraph, gamma_cache: GammaCache, choice: Choice) -> None:
        self.choice, self.gamma_cache = choice, gamma_cache
        self.parameters: dict[str, Tensor] = dict(gamma_cache.model.named_parameters())
        self.chains = chains(graph)
        self._tensors_of = [
            [self.parameters[name] for layer in chain for name in (layer.weight, layer.bias) if name]
            for chain in self.chains
        ]
        self.last_kinds: dict[int, Kind] = {}
        """Which implementation the last step gave to each parameter, by id."""
        self._chain_steps: dict[tuple[object, ...], ChainStep] = {}
        self._tensors: MultiTensorStep | None = None
        self._copies = CapturedCopies()

    def ready(self, groups: Sequence[GroupRule], state: OptimizerState) -> list[Ready]:
        """What can be moved of these parameters, each with the gammas of its weights."""
        self.last_kinds = {}
        found: list[Ready] = []
        if self.chains and self.gamma_cache.refresh_every == 1:
            self.gamma_cache.check_identity()
            found += self._ready_chains(groups, state)
            groups = [
                GroupRule(rule, [p for p in own if id(p) not in self.last_kinds]) for rule, own in groups
            ]
        groups = [group for group in groups if group.parameters]
        kind: Kind = "triton" if groups and _uses_triton(self.choice, groups[0].parameters[0]) else "blocked"
        tensors = (self._ready_tensors if kind == "triton" else self._ready_blocks)(groups, state)
        if tensors is not None:
            found.append(tensors)
            self.last_kinds.update(dict.fromkeys(map(id, tensors.parameters), kind))
        return found

    def _ready_chains(self, groups: Sequence[GroupRule], state: OptimizerState) -> Iterator[ReadyChain]:
        """The chains all of whose parameters have rules compatible with each other."""
        rules = {
            id(p): rule for group in groups
            for p, rule in zip(group.parameters, state.count_next(*group), strict=True)
        }  # fmt: skip
        for k, (chain, tensors) in enumerate(zip(self.chains, self._tensors_of, strict=True)):
            own = [rules[id(t)] for t in tensors if id(t) in rules]
            if len(own) < len(tensors) or own[0].p not in POWERS:
                continue
            if not all(rule.is_compatible(own[0]) for rule in own):
                continue
            layers = [self._layer_tensors(layer, rules, state) for layer in chain]
            kind = choose(self.choice, layers)
            if kind is None:
                continue
            step = self._chain_step(k, layers, kind)
            if step.carries(tensors) or step.start(self.gamma_cache.gammas(own[0].p), layers, tensors):
                self.last_kinds.update(dict.fromkeys(map(id, tensors), kind))
                yield ReadyChain(step, layers, tensors)

    def _ready_blocks(self, groups: list[GroupRule], state: OptimizerState) -> BlockedTensors | None:
        """Those of these parameters on a CPU that have a gamma and can be moved in blocks."""
        if self.choice not in ("auto", "blocked"):
            return None
        found = []
        for rule, own in groups:
            if (
                rule.p not in POWERS
                or own[0].device.type != "cpu"
                or self.gamma_cache.gammas(rule.p).exponents
            ):
                continue
            gammas = self.gamma_cache.gammas_of(own, rule.p)
            for p, next_rule, gamma in zip(own, state.count_next(rule, own), gammas, strict=True):
                if gamma is not None:
                    found.append(Moved(p, next_rule, state.tensors(p) if rule.state_count else (), gamma))
        found = [moved for moved in found if moved.fits()]
        return BlockedTensors(found) if found else None

    def _ready_tensors(self, groups: list[GroupRule], state: OptimizerState) -> ReadyTensors | None:
        """All of these parameters by their measured gammas, if the kernel knows their rules and layouts."""
        rule = groups[0].rule
        if rule.p != 2 or not all(group.rule.is_compatible(rule) for group in groups):
            return None
        parameters = [p for group in groups for p in group.parameters]
        if any(p.dtype is not torch.float32 for p in parameters):
            return None
        states = [state.tensors(p) for p in parameters] if rule.state_count else [()] * len(parameters)
        if rule.method != "sgd":
            states = [(*own, state.count(p)) for own, p in zip(states, parameters, strict=True)]
        gammas = self.gamma_cache.gammas(rule.p)
        if gammas.exponents:
            return None
        if self._tensors is not None and self._tensors.fits(groups, states, gammas):
            return ReadyTensors(self._tensors, groups)
        from pathsgd.optim.fused.gpu.multi_tensor import MultiTensorStep, NotStrided

        own = self.gamma_cache.gammas_of(parameters, rule.p)
        try:
            tensors = MultiTensorStep(groups, states, gammas, own, self._tensors, self._copies)
        except NotStrided:
            return None
        if not is_capturing():  # what was made during a capture lies in memory of the graph
            self._tensors = tensors
        return ReadyTensors(tensors, groups)

    def forget(self) -> None:
        """Drops the carried gammas: the weights were written in a way that does not show."""
        for step in self._chain_steps.values():
            step.forget()

    def _chain_step(self, k: int, layers: list[LayerTensors], kind: Kind) -> ChainStep:
        weight, p = layers[0].weight, int(layers[0].rule.p)
        key = (k, p, kind, weight.device, weight.dtype)
        if key not in self._chain_steps:
            self._chain_steps[key] = ChainStep(self.chains[k], make(kind, self.chains[k], p, weight))
        return self._chain_steps[key]

    def _layer_tensors(self, layer: Layer, rules: Mapping[int, Rule], state: OptimizerState) -> LayerTensors:
        weight = self.parameters[layer.weight]
        bias = None if layer.bias is None else self.parameters[layer.bias]
        rule = rules[id(weight)]
        bias_rule = rule if bias is None else rules[id(bias)]
        assert weight.grad is not None
        kept = state.tensors if rule.state_count else lambda _: ()
        if bias is None:
            return LayerTensors(rule, bias_rule, weight, weight.grad, kept(weight))
        return LayerTensors(
            rule, bias_rule, weight, weight.grad, kept(weight), bias, bias.grad, kept(bias),
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


def _uses_triton(choice: Choice, parameter: Tensor) -> bool:
    on_gpu = parameter.is_cuda and has_triton()
    interpreted = choice == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return choice in ("auto", "triton") and (on_gpu or interpreted)


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
