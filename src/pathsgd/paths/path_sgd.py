"""Path-SGD: steepest descent in the geometry of paths (Algorithm 1 of the paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from pathsgd._torch import is_compiling
from pathsgd.errors import check_p, check_state
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example
from pathsgd.paths.blocked import BlockedChain
from pathsgd.paths.chain import (
    ORDERS,
    Chain,
    ChainStep,
    Moved,
    Moves,
    Rule,
    choose_device,
    find_chains,
)
from pathsgd.paths.model_gammas import ModelGammas
from pathsgd.paths.rule import find_step
from pathsgd.sharding import is_sharded, local_part, place_gradients
from pathsgd.training.lazy_graph import connect

COMMON = ("p", "momentum", "nesterov", "maximize")
"""The options that are the same for all parameters of a chain which is moved as one."""


class PathSGD(Optimizer):
    """Path-SGD, rescaling invariant, with momentum and decoupled weight decay.

    With gamma the path scale of each weight (one forward and one backward pass over the weights) and h the
    gradient in invariant coordinates, a step is

        h = g / sqrt(gamma)
        b = momentum * b + h
        w = (1 - lr * weight_decay) * w - lr * b / sqrt(gamma)

    Without momentum that is the paper's ``w - lr * g / gamma``. A network and its rescaled copy take the same
    steps: momentum lives on h, which a rescaling does not change, and decoupled decay at p = 2 *is* path
    regularisation: the gradient of ``phi_2^2 / 2``, divided by gamma, is w.

    It is for networks of linear layers and ReLU, whose steps take little longer than with SGD. For parameters
    that are on no path, or alone on theirs, gamma = 1 is taken: for them this is SGD. Paths end at batch
    norms. ``print(optimizer.graph)`` says which and why. If that is most of the model, a warning says so.

    Args:
        model: the module to train; or its parameters in any form torch takes, with ``graph``.
        example_input: a tensor, a tuple of inputs or a dict of keyword inputs of the model; only shapes
            matter. May be left out: the model is then traced from the first batch it sees.
        lr: step size; with momentum take 1e-3.
        p: the order of the path norm, 1 <= p <= inf.
        momentum: momentum factor, on h.
        nesterov: Nesterov momentum.
        weight_decay: decoupled weight decay.
        maximize: maximize the objective instead of minimizing it.
        graph: the graph of the model, if it was traced before.
        batch_dim: the batch axis of the inputs, see :func:`pathsgd.trace`.
        fused: whether chains of linear layers are moved by blocks on a CPU and by Triton on a GPU; they
            compute the same as torch operations do. By default wherever that can be.

    Raises:
        ValueError: an option is out of its range.
        TypeError: parameters were passed without the graph of their model.
        TraceError: the model cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = PathSGD(model, lr=0.01)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        example_input: Example | PathGraph | None = None,
        lr: float | Tensor = 3e-3,
        *,
        p: float = 2,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        graph: PathGraph | None = None,
        batch_dim: int | None = 0,
        fused: bool | None = None,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not lr >= 0:  # nan neither
            raise ValueError(f"Invalid learning rate: {lr}")
        if momentum < 0.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        if weight_decay < 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if nesterov and momentum <= 0:
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        check_p(p)
        lazy_graph, params = connect(
            "PathSGD(model", model, example_input, graph, batch_dim, needs_paths=True
        )
        self.gammas = ModelGammas(lazy_graph)
        self._chains = _Chains(self.gammas)
        options = {
            "lr": lr, "p": p, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "maximize": maximize, "fused": fused,
        }  # fmt: skip
        super().__init__(params, options)
        self.gammas.tensors.check_groups(self.param_groups)

    @property
    def graph(self) -> PathGraph:
        """The path graph, which shows what is path-normalised and what is not: ``print(optimizer.graph)``.

        Raises:
            PathError: no example was given and the model has seen no batch yet.
        """
        return self.gammas.graph

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch.optim; ``p`` may be its own.

        Args:
            param_group: the parameters and their options.

        Raises:
            ValueError: an option is out of its range.
        """
        check_p({**self.defaults, **param_group}["p"])
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Any) -> None:
        """As in torch.optim, but momentum keeps its precision: torch would round it to the parameter's.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: it is the state of another optimizer.
        """
        check_state(state_dict, self.defaults)
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            kept = state_dict["state"].get(number, {}).get("momentum_buffer")
            if kept is not None:
                self.state[parameter]["momentum_buffer"] = kept.detach().clone().to(parameter.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "gammas": self.gammas}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._chains = _Chains(self.gammas)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The loss, if there is a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, self._take_gradients(group)) for group in self.param_groups]
        if not any(params for _, params in groups):
            self.gammas.tensors.check_identity()  # gradients may be those of other parameters by now
            return loss
        # Everything is computed before anything is written: an error leaves the weights as they were, and
        # gamma is that of the weights before the step.
        chains = [] if is_compiling() else list(self._chains.measure(groups, self._momentum_buffer))
        moved = {id(m.parameter) for _, moves, _ in chains for layer in moves for m in layer if m is not None}
        steps = [
            (p, *self._find_step(group, p, gamma))
            for group, params in groups
            for rest in [[p for p in params if id(p) not in moved]]
            if rest
            for p, gamma in zip(rest, self.gammas.select(rest, group["p"]), strict=True)
        ]
        for chain, moves, rule in chains:
            chain.move(moves, rule)
        for p, weight, buffer in steps:
            local_part(p).detach().copy_(weight)
            if buffer is not None:
                local_part(self._momentum_buffer(p)).copy_(buffer)
        return loss

    def _take_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        """The parameters of a group that have a gradient."""
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        place_gradients(params)
        if any(parameter.grad.is_sparse for parameter in params):
            raise RuntimeError("PathSGD does not support sparse gradients")
        if any(parameter.is_complex() for parameter in params):
            raise RuntimeError("PathSGD does not support complex parameters")
        return params

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
        return state["momentum_buffer"]

    def _find_step(self, group: dict[str, Any], p: Tensor, gamma: Any) -> tuple[Tensor, Tensor | None]:
        assert p.grad is not None
        buffer = local_part(self._momentum_buffer(p)) if group["momentum"] else None
        return find_step(
            local_part(p), local_part(p.grad), buffer, gamma, lr=group["lr"], momentum=group["momentum"],
            nesterov=group["nesterov"], weight_decay=group["weight_decay"], maximize=group["maximize"],
        )  # fmt: skip


class _Chains:
    """The chains of linear layers of a model, and what moves each of them."""

    def __init__(self, gammas: ModelGammas) -> None:
        self.gammas = gammas
        self._chains: list[tuple[Chain, list[Tensor]]] | None = None
        self._steps: dict[tuple[Chain, torch.device], ChainStep] = {}

    def measure(
        self, groups: Sequence[tuple[dict[str, Any], list[Tensor]]], find_buffer: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[ChainStep, Moves, Rule]]:
        """Measures gamma of the chains whose parameters all have a gradient and the same COMMON options. The
        others are moved parameter by parameter."""
        if self._chains is None:
            parameters_of = dict(self.gammas.tensors.model.named_parameters())
            chains = find_chains(self.gammas.graph)
            self._chains = [
                (chain, [parameters_of[name] for layer in chain for name in layer.names]) for chain in chains
            ]
        group_of = {id(p): group for group, params in groups for p in params}
        for chain, parameters in self._chains:
            options = [group_of[id(p)] for p in parameters if id(p) in group_of]
            if len(options) < len(parameters) or any(map(is_sharded, parameters)):
                continue
            first = options[0]
            alike = all(group[name] == first[name] for group in options for name in COMMON)
            if not alike or first["p"] not in ORDERS or any(group["fused"] is False for group in options):
                continue
            moved = iter(_describe(*pair, find_buffer) for pair in zip(parameters, options, strict=True))
            moves = [(next(moved), None if layer.bias is None else next(moved)) for layer in chain]
            device = choose_device(moves)
            if device is None:
                continue
            self.gammas.tensors.read(self.gammas.graph)  # which checks that the model is still the same
            if (chain, device) not in self._steps:
                self._steps[chain, device] = _make_step(chain, device)
            step = self._steps[chain, device]
            rule = Rule(int(first["p"]), first["momentum"], first["nesterov"], first["maximize"])
            if step.measure(moves, rule.p):
                yield step, moves, rule


def _make_step(chain: Chain, device: torch.device) -> ChainStep:
    if device.type == "cpu":
        return BlockedChain(chain)
    from pathsgd.paths.kernels import KernelChain  # imports Triton

    return KernelChain(chain, device)


def _describe(p: Tensor, group: dict[str, Any], find_buffer: Callable[[Tensor], Tensor]) -> Moved:
    assert p.grad is not None
    buffer = find_buffer(p) if group["momentum"] else None
    return Moved(p, p.grad, buffer, group["lr"], group["weight_decay"])
