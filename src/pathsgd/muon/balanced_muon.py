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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach
from pathsgd.errors import PathError
from pathsgd.geometry.sharded import local_part, place_gradients, reduce_over_ranks, shards_of
from pathsgd.graph.path_graph import PathGraph, traced_model, unwrap
from pathsgd.graph.trace import Example
from pathsgd.muon.upkeep import REFERENCE, Upkeep
from pathsgd.optim.known_parameters import KnownParameters
from pathsgd.optim.lazy_graph import LazyGraph
from pathsgd.optim.relative.blocks import Block, find_blocks
from pathsgd.optim.relative.default_rate import DefaultRate
from pathsgd.optim.relative.muon import orthogonalize_all
from pathsgd.optim.relative.sharded import cut_blocks, on_whole_blocks
from pathsgd.optim.relative.sizes import SizeTable

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
                    f"parameter {name!r} is not the one the optimizer was made with (it was replaced or added "
                    "since, as fully_shard does); make the optimizer again"
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
    """The step of these parameters: which blocks they have, and where their state lies.

    Numbers of blocks, such as norms, are kept in one vector for all.
    """

    def __init__(self, optimizer: BalancedMuon, moved: list[Tensor]) -> None:
        self.moved, self.state = moved, optimizer.state
        self.groups = optimizer.param_groups
        self.layout = [id(group) for group in self.groups]
        names = optimizer._known.names
        found = find_blocks(optimizer.graph)
        shards = {names[id(p)]: shards_of(p) for p in moved if id(p) in names}
        found = cut_blocks(found, shards)
        self.device = local_part(moved[0]).device
        group_of = {id(p): k for k, group in enumerate(self.groups) for p in group["params"]}
        self.blocks: list[Block] = []
        self.parameters: list[Tensor] = []
        """By block."""
        for p in moved:
            own = found[names[id(p)]] if id(p) in names else [_make_stray(p, -1 - len(self.blocks))]
            self.blocks += own
            self.parameters += [p] * len(own)
        self.orthogonal = [k for k, block in enumerate(self.blocks) if block.orthogonal]
        self.turning = [k for k, block in enumerate(self.blocks) if block.turns]
        self.entrywise = [p for p in moved if not _is_orthogonal(p, self.blocks, self.parameters)]
        self.table = SizeTable(self.blocks, self.device)
        self.group_of_block = [group_of[id(p)] for p in self.parameters]
        self.sharded = [block.shards for block in self.blocks]

        def put(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=self.device)

        self.masks = [put([k == own for own in self.group_of_block]) for k in range(len(self.groups))]
        self.ratios = put([block.ratio for block in self.blocks])
        self.shares = put([1 / self.blocks[k].share for k in self.turning])
        self.turning_index = torch.tensor(self.turning, device=self.device)
        self._make_state()

    def fits(self, moved: list[Tensor]) -> bool:
        return (
            len(moved) == len(self.moved)
            and all(p is q for p, q in zip(moved, self.moved, strict=True))
            and self.layout == [id(group) for group in self.groups]
        )

    def _make_state(self) -> None:
        """Makes what is not there yet. Numbers of blocks and of parameters become parts of one tensor each."""
        count = len(self.turning)
        self.growth = torch.zeros(3, count, dtype=torch.float64, device=self.device)
        start = 0
        for p in dict.fromkeys(self.parameters[k] for k in self.turning):
            own = sum(self.parameters[k] is p for k in self.turning)
            part = self.growth[:, start : start + own]
            if GROWTH in self.state[p]:
                part.copy_(self.state[p][GROWTH])
            self.state[p][GROWTH] = part
            start += own
        self.steps = torch.zeros(len(self.entrywise), dtype=torch.float64, device=self.device)
        for k, p in enumerate(self.entrywise):
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
        values = [group[name] for group in self.groups]
        if all(value is values[0] or value == values[0] for value in values if not isinstance(value, Tensor)):
            if not any(isinstance(value, Tensor) for value in values[1:]):
                return values[0]
        return sum((value * mask for value, mask in zip(values, self.masks, strict=True)), torch.zeros_like(self.ratios))

    def run(self) -> None:
        grads = {id(p): local_part(p.grad) for p in self.moved}  # type: ignore[arg-type]
        weights = {id(p): local_part(p).detach() for p in self.moved}
        wide = {key: w.to(torch.promote_types(w.dtype, torch.float32)) for key, w in weights.items()}
        ws = [block.of(wide[id(p)]) for block, p in zip(self.blocks, self.parameters, strict=True)]
        gs = [block.of(grads[id(p)]) for block, p in zip(self.blocks, self.parameters, strict=True)]
        turning = self.turning_index
        squares = torch.stack(
            [_dot(ws, ws), _dot(gs, gs), _dot(gs, ws)]
        )
        squares = reduce_over_ranks(squares, self.sharded) if any(self.sharded) else squares
        norms, gradients, along = squares[0].sqrt(), squares[1].sqrt(), squares[2]
        size, turns, catch_up = self.table.measure(norms, None)
        lr = self._option("lr")
        length = lr * self.ratios * size
        noise = NOISE * torch.finfo(ws[0].dtype).eps
        length = torch.where(self.table.find_noise(gradients, noise), 0, length)
        directions, length = self._find_directions(gs, length)
        parts = length.to(ws[0].dtype).neg().unbind()
        steps = foreach("mul", directions, list(parts))
        foreach("add_", ws, steps)
        if len(turning):
            turned = [ws[k] for k in self.turning]
            new = _dot(turned, turned)
            if any(self.sharded):
                new = reduce_over_ranks(new, [self.sharded[k] for k in self.turning])
            old, new = norms[turning], new.sqrt()
            grow = self._grow(along[turning], noise * gradients[turning], lr, catch_up[turning])
            kept = turns[turning] & (old > 0) & (new > 0)
            factors = torch.where(kept, grow * old / torch.where(kept, new, 1), 1)
            foreach("mul_", turned, list(factors.to(ws[0].dtype).unbind()))
        for key, w in weights.items():
            if wide[key] is not w:
                w.copy_(wide[key])

    def _find_directions(self, gs: list[Tensor], length: Tensor) -> tuple[list[Tensor], Tensor]:
        """The direction of every block, and how far to go in it."""
        found: list[Tensor] = list(gs)
        for group in self.groups:
            own = [k for k in self.orthogonal if self.groups[self.group_of_block[k]] is group]
            if not own:
                continue
            grads = [gs[k].to(torch.promote_types(gs[k].dtype, torch.float32)) for k in own]
            buffers = [
                self.blocks[k].of(local_part(self.state[self.parameters[k]]["momentum_buffer"])) for k in own
            ]
            foreach("mul_", buffers, group["momentum"])
            foreach("add_", buffers, grads)
            ds = foreach("add", grads, buffers, alpha=group["momentum"]) if group["nesterov"] else buffers
            for k, d in zip(own, ds, strict=True):
                found[k] = d
        blocks = [self.blocks[k] for k in self.orthogonal]
        ds = on_whole_blocks(blocks, [found[k] for k in self.orthogonal], orthogonalize_all)
        for k, d in zip(self.orthogonal, ds, strict=True):
            found[k] = d
        return self._find_entrywise(found, length)

    def _find_entrywise(self, found: list[Tensor], length: Tensor) -> tuple[list[Tensor], Tensor]:
        """Adam's direction of all other blocks."""
        if not self.entrywise:
            return found, length
        self.steps += 1
        numbers = {id(p): k for k, p in enumerate(self.entrywise)}
        directions: dict[int, Tensor] = {}
        correction = torch.ones_like(length)
        for index, group in enumerate(self.groups):
            own = [p for p in group["params"] if id(p) in numbers]
            if not own:
                continue
            first, second = group["betas"]
            grads = [local_part(p.grad) for p in own]  # type: ignore[arg-type]
            means = [local_part(self.state[p]["exp_avg"]) for p in own]
            squares = [local_part(self.state[p]["exp_avg_sq"]) for p in own]
            foreach("lerp_", means, grads, 1 - first)
            foreach("mul_", squares, second)
            foreach("addcmul_", squares, grads, grads, 1 - second)
            sizes = foreach("sqrt", squares)
            foreach("add_", sizes, group["eps"])
            for p, d in zip(own, foreach("div", means, sizes), strict=True):
                directions[id(p)] = d
            own_steps = self.steps[[numbers[id(p)] for p in own]]
            scale = (1 - second**own_steps).sqrt() / (1 - first**own_steps)
            places = [k for k, p in enumerate(self.parameters) if any(p is q for q in own)]
            at = {id(p): k for k, p in enumerate(own)}
            correction[places] = scale[[at[id(self.parameters[k])] for k in places]]
        for k, (block, p) in enumerate(zip(self.blocks, self.parameters, strict=True)):
            if id(p) in directions:
                found[k] = block.of(directions[id(p)]).to(found[k].dtype)
        return found, length * correction

    def _grow(self, along: Tensor, noise: Tensor, lr: float | Tensor, catch_up: Tensor) -> Tensor:
        """The factors by which norms grow."""
        first, second, steps = self.growth
        steps += 1
        first.lerp_(along, 1 - GROWTH_BETAS[0])
        second.lerp_(along.square() + noise.square(), 1 - GROWTH_BETAS[1])
        mean = first / (1 - GROWTH_BETAS[0] ** steps)
        size = (second / (1 - GROWTH_BETAS[1] ** steps)).sqrt()
        direction = torch.where(size > 0, -mean / torch.where(size > 0, size, 1), 0)
        speed = torch.where(catch_up > 1, catch_up, self.shares)

        def of_turning(option: float | Tensor) -> float | Tensor:
            return option[self.turning_index] if isinstance(option, Tensor) and option.dim() else option

        rate = of_turning(lr)
        factor = torch.exp(rate * of_turning(self._option("growth")) * speed * direction)
        return factor * (1 - rate * of_turning(self._option("weight_decay")))


def _dot(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """The products of all pairs, in fp64."""
    return torch.stack(
        [torch.dot(x.reshape(-1).to(y.dtype), y.reshape(-1)) for x, y in zip(xs, ys, strict=True)]
    ).double()


def _is_orthogonal(p: Tensor, blocks: Sequence[Block], parameters: Sequence[Tensor]) -> bool:
    return all(block.orthogonal for block, own in zip(blocks, parameters, strict=True) if own is p)


def _make_stray(p: Tensor, family: int) -> Block:
    """A parameter that is not the model's: it takes relative steps in Adam's direction."""
    shape = tuple(p.shape)
    nothing = torch.zeros(1, dtype=torch.int64)
    return Block(
        "", shape, 0, 0, shape[0] if shape else 1, family, False, 1.0, 1.0, False, nothing, nothing
    )
