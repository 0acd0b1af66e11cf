"""BalancedMuon: relative steps on the weights of a balanced network.

1. Balance. Of all networks that differ by a rescaling of units, take the one with the least sum of squares
   (:func:`pathsgd.balance`), and keep it there. Whatever follows is then the same for all of them.
2. Turn. A matrix W moves in the direction of its orthogonalised momentum, by an angle of ``lr``:

       W <- |W| (W - lr |W| D) / |W - lr |W| D|,    D = orthogonalize(momentum) / its norm

   Biases and the weights of norms, which are not turned, move by ``lr`` times the size of a weight of their
   layer in Adam's direction; so do embeddings and the last layer, which are turned.
3. Grow. Turning keeps norms, so the logarithm of each has a step of its own: Adam on ``<G, W>``, its
   derivative. The norms of a region's layers enter the function as a product, so they share that step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach
from pathsgd.errors import PathError
from pathsgd.geometry.sharded import Shard, local_part, place_gradients, reduce_over_ranks, shards_of
from pathsgd.graph.path_graph import PathGraph, traced_model, unwrap
from pathsgd.graph.trace import Example
from pathsgd.muon.sizes import Sizes
from pathsgd.muon.upkeep import REFERENCE, Upkeep
from pathsgd.optim.known_parameters import KnownParameters
from pathsgd.optim.lazy_graph import LazyGraph
from pathsgd.optim.relative.blocks import Block, find_blocks
from pathsgd.optim.relative.default_rate import DefaultRate
from pathsgd.optim.relative.muon import orthogonalize_all
from pathsgd.optim.relative.sharded import cut_blocks, on_whole_blocks

GROWTH_BETAS = (0.9, 0.99)
NOISE = 2.0**10
"""So many units in the last place of a gradient are rounding. Before a batch norm all of ``<G, W>`` and all
of a bias's gradient is: neither is normalised to a step."""
GROWTH = "norm_growth"
"""In the state of a parameter: for each of its blocks both averages of ``<G, W>`` and the number of steps."""


class BalancedMuon(Optimizer):
    """Muon with relative steps on a balanced network: no rate to tune, the same from every rescaled start.

    The model is balanced in place when the optimizer is made, or at the first step if it is traced then, and
    kept so. Its function does not change by that, its weights do: make copies for averaging afterwards. Units
    that lead into or out of parameters which are frozen, or which this optimizer does not have, are left as
    they are.

    Every matrix and kernel turns by an angle of ``lr`` in the direction of its orthogonalised momentum; rows
    that are used apart, as queries, keys and values in one matrix, turn apart. Embeddings, the last layer,
    biases and the weights of norms take Adam's direction. ``print(optimizer.graph)`` says what is covered.

    Args:
        model: the module to train; or its parameters in any form torch takes, with ``graph``.
        example_input: a tensor, a tuple of inputs or a dict of keyword inputs of the model; only shapes
            matter. May be left out: the model is then traced from the first batch it sees.
        lr: the angle of a step, in radians; of the other parameters, the step relative to their size. By
            default 0.06; if there is no schedule, it falls after 100 steps.
        momentum: momentum factor of what is orthogonalised.
        nesterov: Nesterov momentum.
        betas: decay rates of Adam's running averages.
        eps: added to Adam's denominator.
        weight_decay: decoupled decay of the norms of matrices and kernels.
        growth: how fast norms may grow, in units of ``lr``. 0 keeps all norms.
        graph: the graph of the model, if it was traced before.
        batch_dim: the batch axis of the inputs, see :func:`pathsgd.trace`.

    Raises:
        ValueError: an option is out of its range.
        TypeError: parameters were passed without the graph of their model.
        TraceError: the model cannot be traced.
        PathError: a parameter holds nan or inf.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = BalancedMuon(model)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    default_lr = 0.06

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        example_input: Example | PathGraph | None = None,
        lr: float | Tensor | None = None,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        growth: float = 1.0,
        graph: PathGraph | None = None,
        batch_dim: int | None = 0,
    ) -> None:
        rate = self.default_lr if lr is None else lr
        for name, value in (
            ("learning rate", rate), ("momentum", momentum), ("eps", eps), ("weight_decay", weight_decay),
            ("growth", growth),
        ):  # fmt: skip
            if not value >= 0:
                raise ValueError(f"Invalid {name} value: {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Invalid betas: {betas}")
        if isinstance(example_input, (int, float)):
            raise TypeError(f"example_input comes after the model, and lr by its name: lr={example_input}")
        params: Iterable[Any]
        if isinstance(model, nn.Module):
            self._model, params = unwrap(model), list(unwrap(model).parameters())
            example_input = graph or example_input
        else:
            params = model
            example_input = graph or (example_input if isinstance(example_input, PathGraph) else None)
            traced = None if example_input is None else traced_model(example_input)
            if traced is None:
                raise TypeError(
                    "parameters alone do not say which units they lead to: pass the model itself, "
                    "BalancedMuon(model, example_input), or graph=pathsgd.trace(model, example_input)"
                )
            self._model = traced
        self._lazy_graph = LazyGraph(self._model, example_input, batch_dim, needs_paths=False)
        self._known = KnownParameters(self._model)
        self._upkeep: Upkeep | None = None
        self._plan: _Plan | None = None
        super().__init__(
            params,
            {
                "lr": rate, "momentum": momentum, "nesterov": nesterov, "betas": betas, "eps": eps,
                "weight_decay": weight_decay, "growth": growth,
            },
        )  # fmt: skip
        self._known.check_groups(self.param_groups)
        self._default_rate = DefaultRate(self.param_groups) if lr is None else None
        if self._lazy_graph.graph is not None:
            self._start()

    @property
    def graph(self) -> PathGraph:
        """Which units can be rescaled: ``print(optimizer.graph)``.

        Raises:
            PathError: no example was given and the model has seen no batch yet.
        """
        return self._lazy_graph.get()

    def refresh(self) -> None:
        """Looks at the next step whether the weights were rescaled by others.

        Call it after writing weights in a way that torch does not count: through ``.data`` or numpy. Ordinary
        in-place writes are noticed. With several ranks call it on all of them.
        """
        if self._upkeep is not None:
            self._upkeep.forget_versions()

    def _start(self) -> Upkeep:
        """Balances the model."""
        owned = {
            self._known.names[id(p)]: p for group in self.param_groups for p in group["params"]
            if id(p) in self._known.names
        }  # fmt: skip
        self._upkeep = Upkeep(self.graph, self._model, owned, self.state)
        self._upkeep.start()
        return self._upkeep

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # every step would be compiled again
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
        if self._default_rate is not None:
            self._default_rate.before_step(self.param_groups)
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if moved:
            if any(p.grad.is_sparse for p in moved):  # type: ignore[union-attr]
                raise RuntimeError("BalancedMuon does not support sparse gradients")
            upkeep = self._upkeep or self._start()
            place_gradients(moved)
            upkeep.before_step()
            self._find_plan(moved).run()
            upkeep.after_step(self._is_still())
        else:
            self._check_gradients_arrive()
        if self._default_rate is not None:
            self._default_rate.after_step(self.param_groups)
        return loss

    def _check_gradients_arrive(self) -> None:
        """If no parameter has a gradient, it may be because the model has others by now."""
        for name, parameter in self._model.named_parameters():
            if self._known.names.get(id(parameter)) != name:
                raise PathError(
                    f"parameter {name!r} is not the one the optimizer was made with (it was replaced or "
                    "added since, as fully_shard does); make the optimizer again"
                )

    def _is_still(self) -> bool:
        """Whether this step is to change nothing, as those that torch's checkpoints take at rate 0."""
        return not any(isinstance(group["lr"], Tensor) or group["lr"] for group in self.param_groups)

    def _find_plan(self, moved: list[Tensor]) -> _Plan:
        if self._plan is None or not self._plan.fits(moved):
            self._plan = _Plan(self, moved)
        return self._plan

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group.

        Args:
            param_group: the parameters and their options.
        """
        super().add_param_group(param_group)
        self._plan = None
        if self._upkeep is not None:
            self._start()

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the state of a BalancedMuon.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: it is the state of another optimizer.
        """
        for state in state_dict["state"].values():
            if "growth" in state or "unit_scales" in state:
                raise ValueError(
                    "this is the state of PathMuon, whose momentum is of other coordinates; a BalancedMuon "
                    "starts anew from the weights alone"
                )
        super().load_state_dict(state_dict)
        # torch takes all state to the dtype of its parameter.
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key in (GROWTH, *REFERENCE):
                kept = state_dict["state"].get(number, {}).get(key)
                if kept is not None:
                    self.state[parameter][key] = kept.detach().clone().to(parameter.device)
        self._plan = None
        if self._upkeep is not None:
            self._upkeep.resume()
        if self._default_rate is not None:
            self._default_rate.resume(self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__dict__.get("_upkeep") is not None:
            self._upkeep.connect(self.state)  # type: ignore[union-attr]


class _Plan:
    """The step of these parameters: the blocks they have, and where their state lies.

    Numbers of blocks, such as norms, are kept in one vector for all.
    """

    def __init__(self, optimizer: BalancedMuon, moved: list[Tensor]) -> None:
        self.moved, self.state, self.groups = moved, optimizer.state, optimizer.param_groups
        self.device = local_part(moved[0]).device
        names = optimizer._known.names
        found = find_blocks(optimizer.graph)
        found = cut_blocks(found, {names[id(p)]: shards_of(p) for p in moved if id(p) in names})
        self.blocks: list[Block] = []
        self.parameters: list[Tensor] = []
        """By block."""
        for p in moved:
            own = found[names[id(p)]] if id(p) in names else [_make_stray(p, -1 - len(self.blocks))]
            self.blocks += own
            self.parameters += [p] * len(own)
        self.shards = [block.shards for block in self.blocks]
        self.sharded = any(self.shards)
        self.orthogonal = [k for k, block in enumerate(self.blocks) if block.orthogonal]
        self.turning = [k for k, block in enumerate(self.blocks) if block.turns]
        self.sizes = Sizes(self.blocks, self.device)
        self.ratios = self._put([block.ratio for block in self.blocks])
        self.shares = self._put([1 / self.blocks[k].share for k in self.turning])
        self.turning_index = torch.tensor(self.turning, device=self.device)
        self._sort_by_group()
        self._make_state()

    def _put(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def _sort_by_group(self) -> None:
        group_of = {id(p): k for k, group in enumerate(self.groups) for p in group["params"]}
        by_block = [group_of[id(p)] for p in self.parameters]
        self.masks = [self._put([k == own for own in by_block]) for k in range(len(self.groups))]
        self.in_momentum = [[b for b in self.orthogonal if by_block[b] == k] for k in range(len(self.groups))]
        orthogonal = {id(self.parameters[k]) for k in self.orthogonal}
        self.entrywise = [
            [p for p in self.moved if group_of[id(p)] == k and id(p) not in orthogonal]
            for k in range(len(self.groups))
        ]
        numbers = {id(p): k for k, p in enumerate(p for own in self.entrywise for p in own)}
        self.step_of_block = torch.tensor(
            [numbers.get(id(p), -1) for p in self.parameters], device=self.device
        )

    def fits(self, moved: list[Tensor]) -> bool:
        """Whether it is the step of these parameters."""
        return len(moved) == len(self.moved) and all(map(operator.is_, moved, self.moved))

    def _make_state(self) -> None:
        """Makes what is not there yet; numbers of blocks and parameters become parts of one tensor each."""
        self.growth = self._put([0.0] * 3 * len(self.turning)).view(3, -1)
        start = 0
        for p in dict.fromkeys(self.parameters[k] for k in self.turning):
            part = self.growth[:, start : start + sum(self.parameters[k] is p for k in self.turning)]
            if GROWTH in self.state[p]:
                part.copy_(self.state[p][GROWTH])
            self.state[p][GROWTH] = part
            start += part.shape[1]
        entrywise = [p for own in self.entrywise for p in own]
        self.steps = self._put([0.0] * len(entrywise))
        for k, p in enumerate(entrywise):
            state = self.state[p]
            if "exp_avg" not in state:
                state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            if "step" in state:
                self.steps[k].copy_(state["step"])
            state["step"] = self.steps[k]
        for k in self.orthogonal:
            state = self.state[self.parameters[k]]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(self.parameters[k])

    def _option(self, name: str) -> float | Tensor:
        """An option by block; one number where all groups have the same."""
        first, *others = (group[name] for group in self.groups)
        if all(value is first or (not isinstance(value, Tensor) and value == first) for value in others):
            return first
        return torch.stack(
            [group[name] * mask for group, mask in zip(self.groups, self.masks, strict=True)]
        ).sum(0)

    def run(self) -> None:
        """Takes the step."""
        local = [local_part(p).detach() for p in self.moved]
        wide = [w.to(torch.promote_types(w.dtype, torch.float32)) for w in local]
        ws = self._find_blocks(wide)
        gs = self._find_blocks(
            [local_part(p.grad).to(w.dtype) for p, w in zip(self.moved, wide, strict=True)]
        )  # type: ignore[arg-type]
        products = self._add_over_ranks(torch.stack([_dot(ws, ws), _dot(gs, gs), _dot(gs, ws)]), self.shards)
        norms, gradients = products[:2].sqrt()
        size, turns = self.sizes.measure(norms)
        rounding = NOISE * torch.finfo(ws[0].dtype).eps
        length = self._option("lr") * self.ratios * size
        length = torch.where(self.sizes.find_noise(gradients, rounding), 0, length)
        directions = self._orthogonalize(gs)
        length = self._find_entrywise(directions, gs, length)
        foreach("add_", ws, foreach("mul", directions, list(length.neg().to(ws[0].dtype).unbind())))
        if self.turning:
            index = self.turning_index
            turned = [ws[k] for k in self.turning]
            new = self._add_over_ranks(_dot(turned, turned), [self.shards[k] for k in self.turning]).sqrt()
            growth = self._grow(products[2, index], rounding * gradients[index])
            kept = turns[index] & (new > 0)
            factors = torch.where(kept, growth * norms[index] / torch.where(kept, new, 1), 1)
            foreach("mul_", turned, list(factors.to(ws[0].dtype).unbind()))
        for w, new_w in zip(local, wide, strict=True):
            if w is not new_w:
                w.copy_(new_w)

    def _find_blocks(self, tensors: list[Tensor]) -> list[Tensor]:
        """The parts of tensors, one for each parameter, that are blocks."""
        by_parameter = {id(p): tensor for p, tensor in zip(self.moved, tensors, strict=True)}
        return [block.of(by_parameter[id(p)]) for block, p in zip(self.blocks, self.parameters, strict=True)]

    def _add_over_ranks(self, sums: Tensor, shards: Sequence[tuple[Shard, ...]]) -> Tensor:
        return reduce_over_ranks(sums, shards) if self.sharded else sums

    def _orthogonalize(self, gs: list[Tensor]) -> list[Tensor]:
        """The direction of every block that is orthogonalised, with root mean square 1; the others' are left
        as they are."""
        found = list(gs)
        for group, own in zip(self.groups, self.in_momentum, strict=True):
            if not own:
                continue
            grads = [gs[k] for k in own]
            buffers = [
                self.blocks[k].of(local_part(self.state[self.parameters[k]]["momentum_buffer"])) for k in own
            ]
            foreach("mul_", buffers, group["momentum"])
            foreach("add_", buffers, grads)
            moments = (
                foreach("add", grads, buffers, alpha=group["momentum"]) if group["nesterov"] else buffers
            )
            for k, moment in zip(own, moments, strict=True):
                found[k] = moment
        blocks = [self.blocks[k] for k in self.orthogonal]
        moments = [found[k] for k in self.orthogonal]
        for k, d in zip(self.orthogonal, on_whole_blocks(blocks, moments, orthogonalize_all), strict=True):
            found[k] = d
        return found

    def _find_entrywise(self, directions: list[Tensor], gs: list[Tensor], length: Tensor) -> Tensor:
        """Adam's direction of all other blocks, in place; and the lengths with its corrections."""
        self.steps += 1
        corrected = length
        for group, own, mask in zip(self.groups, self.entrywise, self.masks, strict=True):
            if not own:
                continue
            first, second = group["betas"]
            means, squares = (
                [local_part(self.state[p][key]) for p in own] for key in ("exp_avg", "exp_avg_sq")
            )
            grads = [local_part(p.grad).to(mean.dtype) for p, mean in zip(own, means, strict=True)]  # type: ignore[arg-type]
            foreach("lerp_", means, grads, 1 - first)
            foreach("mul_", squares, second)
            foreach("addcmul_", squares, grads, grads, 1 - second)
            sizes = foreach("sqrt", squares)
            foreach("add_", sizes, group["eps"])
            found = {id(p): d for p, d in zip(own, foreach("div", means, sizes), strict=True)}
            for k, (block, p) in enumerate(zip(self.blocks, self.parameters, strict=True)):
                if id(p) in found:
                    directions[k] = block.of(found[id(p)]).to(gs[k].dtype)
            correction = (1 - second**self.steps).sqrt() / (1 - first**self.steps)
            here = (mask > 0) & (self.step_of_block >= 0)
            corrected = torch.where(here, length * correction[self.step_of_block], corrected)
        return corrected

    def _grow(self, along: Tensor, noise: Tensor) -> Tensor:
        """The factors by which norms grow, from ``<G, W>``."""
        first, second, steps = self.growth
        steps += 1
        first.lerp_(along, 1 - GROWTH_BETAS[0])
        second.lerp_(along.square() + noise.square(), 1 - GROWTH_BETAS[1])
        mean = first / (1 - GROWTH_BETAS[0] ** steps)
        size = (second / (1 - GROWTH_BETAS[1] ** steps)).sqrt()
        direction = torch.where(size > 0, -mean / torch.where(size > 0, size, 1), 0)
        lr, growth, decay = (
            option[self.turning_index] if isinstance(option, Tensor) and option.dim() else option
            for option in map(self._option, ("lr", "growth", "weight_decay"))
        )
        return torch.exp(lr * growth * self.shares * direction) * (1 - lr * decay)


def _dot(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """The products of all pairs, in fp64."""
    return torch.stack(
        [torch.dot(x.reshape(-1).to(y.dtype), y.reshape(-1)) for x, y in zip(xs, ys, strict=True)]
    ).double()


def _make_stray(p: Tensor, family: int) -> Block:
    """A parameter that is not the model's: it takes relative steps in Adam's direction."""
    shape = tuple(p.shape)
    nothing = torch.zeros(1, dtype=torch.int64)
    return Block("", shape, 0, 0, shape[0] if shape else 1, family, False, 1.0, 1.0, False, nothing, nothing)
