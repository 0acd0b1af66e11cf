"""BalancedMuon: relative steps on the weights of a balanced network.

1. Balance. Of all networks that differ by a rescaling of units, take the one with the least sum of squares
   (:func:`pathsgd.balance`), and keep it there. Whatever follows is then the same for all of them.
2. Turn. A matrix W moves in the direction of its orthogonalised momentum, by an angle of ``lr``:

       W <- |W| (W - lr |W| D) / |W - lr |W| D|,    D = orthogonalize(momentum) / its norm

   The angle falls as the third root of the number of steps, beside any schedule, and momentum reaches back a
   tenth of the steps so far, until it is as long as it may be.

   Biases and the weights of norms, which are not turned, move by ``lr`` times the size of a weight of their
   layer in Adam's direction; so do embeddings and the last layer, which are turned, but farther.
3. Grow. Turning keeps norms, so the logarithm of each has a step of its own: Adam on ``<G, W>``, its
   derivative, and weight decay. This step falls as the number of steps: norms find their scale early and grow
   as a power of that number at most. The norms of a region's layers enter the function as a product, so they
   share it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from pathsgd._torch import foreach, keep_uncompiled
from pathsgd.errors import PathError, check_state
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example
from pathsgd.muon.block_table import BlockTable
from pathsgd.muon.blocks import is_wide
from pathsgd.muon.default_rate import DefaultRate
from pathsgd.muon.orthogonalize import orthogonalize_all
from pathsgd.muon.sharded import on_whole_blocks
from pathsgd.muon.upkeep import REFERENCE, Upkeep
from pathsgd.sharding import local_part, place_gradients, reduce_over_ranks
from pathsgd.training.capture import has_triton
from pathsgd.training.lazy_graph import connect, find_depth_of_caller
from pathsgd.training.staleness import ModelTensors

if TYPE_CHECKING:
    from pathsgd.muon.gpu.step import KernelStep

FALL, POWER = 10, 1 / 3
"""A step after t others turns ``(1 + t / FALL) ** -POWER`` as far as the first, and grows by a factor of
``1 / (1 + t / FALL)`` less: norms that grow later fit noise."""
REACH = 10
"""Momentum is an average over ``2 + t / REACH`` steps after t others, and ``1 / (1 - momentum)`` at most."""
FARTHER = 2.5
"""Of an orthogonalised direction the root mean square is 1, of Adam's less, since gradients are noisy: in it
matrices go this much farther."""
GROWTH_BETAS = (0.9, 0.99)
NOISE = 2.0**10
"""Gradients below this many units in the last place are taken for rounding errors. Before a batch norm
``<G, W>`` and the gradient of a bias are zero but for rounding, and must not be normalised to a step."""
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
        lr: the angle of the first step, in radians; of the other parameters, the step relative to their size.
            Later steps are shorter by the third root of their number. By default 0.09; if there is no
            schedule, it falls after 30 steps.
        momentum: momentum factor of what is orthogonalised, after the first steps.
        nesterov: Nesterov momentum.
        betas: decay rates of Adam's running averages.
        eps: added to Adam's denominator.
        weight_decay: decoupled decay of the norms of matrices and kernels, shared and falling like growth.
        growth: how fast norms may grow at first, in units of ``lr``; it falls as the number of steps. 0 keeps
            all norms, but for the decay.
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

    default_lr = 0.09

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
        weight_decay: float = 0.25,
        growth: float = 2.5,
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
        if isinstance(lr, float) and 1e-5 <= lr <= 2e-3:  # AdamW's
            warnings.warn(
                f"lr={lr:g} is a tiny angle, which hardly trains; leave it out, or fine-tune at 0.009",
                stacklevel=2,
            )
        lazy_graph, params = connect(
            "BalancedMuon(model", model, example_input, graph, batch_dim, needs_paths=False
        )
        self._lazy_graph, self._tensors = lazy_graph, ModelTensors(lazy_graph.model)
        self._upkeep: Upkeep | None = None
        self._step: RelativeStep | None = None
        super().__init__(
            params,
            {
                "lr": rate, "momentum": momentum, "nesterov": nesterov, "betas": betas, "eps": eps,
                "weight_decay": weight_decay, "growth": growth,
            },
        )  # fmt: skip
        self._tensors.check_groups(self.param_groups)
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
            self._tensors.names[id(p)]: p for group in self.param_groups for p in group["params"]
            if id(p) in self._tensors.names
        }  # fmt: skip
        self._upkeep = Upkeep(self.graph, self._tensors, owned, self.state, self.param_groups)
        if vectors := self._upkeep.find_holding_vectors():
            more = f" and {len(vectors) - 1} more are" if vectors[1:] else " is"
            warnings.warn(
                f"{vectors[0]}{more} frozen or not among this optimizer's parameters, so the units there are "
                "not rescaled and the model is trained as it is scaled: train them (requires_grad_()), or "
                "call pathsgd.balance(model, example_input) before",
                stacklevel=find_depth_of_caller(),
            )
        self._upkeep.start()
        return self._upkeep

    @keep_uncompiled  # every step would be compiled again
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The loss, if there is a closure.

        Raises:
            RuntimeError: a gradient is sparse.
            PathError: the model has other parameters or modules than when the optimizer was made, or no batch
                was seen to trace it from; or parameters are float16.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._default_rate is not None:
            self._default_rate.before_step(self.param_groups)
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if moved:
            if any(p.grad.is_sparse for p in moved):
                raise RuntimeError("BalancedMuon does not support sparse gradients")
            place_gradients(moved)
            upkeep = self._upkeep or self._start()
            upkeep.before_step()
            is_still = self._is_still()
            with upkeep.whole_gains():
                self._find_step(moved).run()
                if not is_still:
                    upkeep.do_round()
            upkeep.after_step(is_still)
        else:
            self._tensors.check_identity()  # gradients may be those of other parameters by now
        if self._default_rate is not None:
            self._default_rate.after_step(self.param_groups)
        return loss

    def _is_still(self) -> bool:
        """Whether this step is to change nothing, as those that torch's checkpoints take at rate 0."""
        return not any(isinstance(group["lr"], Tensor) or group["lr"] for group in self.param_groups)

    def _find_step(self, moved: list[Tensor]) -> RelativeStep:
        if self._step is None or not self._step.table.fits(moved):
            table = BlockTable(self.graph, self._tensors.names, moved, self.param_groups)
            self._step = RelativeStep(table, self.state)
        return self._step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group.

        Args:
            param_group: the parameters and their options.
        """
        super().add_param_group(param_group)
        self._step = None
        if self._upkeep is not None:
            self._start()

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the state of a BalancedMuon.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: it is the state of another optimizer.
        """
        check_state(state_dict, self.defaults)
        super().load_state_dict(state_dict)
        # torch takes all state to the dtype of its parameter.
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key in (GROWTH, *REFERENCE):
                kept = state_dict["state"].get(number, {}).get(key)
                if kept is not None:
                    self.state[parameter][key] = kept.detach().clone().to(parameter.device)
        self._step = None
        if self._upkeep is not None:
            self._upkeep.resume()
        if self._default_rate is not None:
            self._default_rate.resume(self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__dict__.get("_upkeep") is not None:
            self._upkeep.connect(self.state, self.param_groups)  # type: ignore[union-attr]


class RelativeStep:
    """The step of these blocks.

    Args:
        table: of the blocks.
        state: the optimizer's; what is not there yet is made.
    """

    def __init__(self, table: BlockTable, state: MutableMapping[Tensor, Any]) -> None:
        self.table, self.state = table, state
        self.farther = table.put([FARTHER if is_wide(block.shape) else 1.0 for block in table.blocks])
        self.growth = table.put([0.0] * 3 * len(table.blocks)).view(3, -1)
        for k, p in enumerate(table.moved):
            if p.dtype == torch.float16:
                raise PathError(
                    f"parameter {table.blocks[table.owners.index(k)].name!r} is float16, in which squares of "
                    "gradients vanish, so that steps would be nan: use bfloat16 parameters, or float32 ones "
                    "with torch.autocast"
                )
            own_state, start = state[p], table.owners.index(k)
            part = self.growth[:, start : start + table.owners.count(k)]
            if GROWTH in own_state:
                part.copy_(own_state[GROWTH])
            own_state[GROWTH] = part
            for key in ("momentum_buffer",) if k in table.matrices else ("exp_avg", "exp_avg_sq"):
                if key not in own_state:
                    own_state[key] = torch.zeros_like(p)
        self.kernels: KernelStep | None = None
        if table.device.type == "cuda" and has_triton():
            from pathsgd.muon.gpu.step import KernelStep

            self.kernels = KernelStep(table, state, self.find_momenta, self.decide)

    def run(self) -> None:
        """Takes the step."""
        if self.kernels is not None and self.kernels.run():
            return
        local = [local_part(p).detach() for p in self.table.moved]
        wide = [w.to(torch.promote_types(w.dtype, torch.float32)) for w in local]
        grads = [local_part(p.grad).to(w.dtype) for p, w in zip(self.table.moved, wide, strict=True)]  # type: ignore[arg-type]
        ws, gs = self.table.cut(wide), self.table.cut(grads)
        ds = self._find_directions(grads)
        pairs = ((ws, ws), (gs, gs), (gs, ws), (ws, ds), (ds, ds))
        products = torch.stack([_multiply(xs, ys) for xs, ys in pairs])
        if any(self.table.shards):
            products = reduce_over_ranks(products, self.table.shards)
        length, factor = self.decide(products, torch.finfo(ws[0].dtype).eps)
        foreach("add_", ws, foreach("mul", ds, list(length.neg().to(ws[0].dtype).unbind())))
        foreach("mul_", ws, list(factor.to(ws[0].dtype).unbind()))
        for w, new in zip(local, wide, strict=True):
            if w is not new:
                w.copy_(new)

    def _find_directions(self, grads: list[Tensor]) -> list[Tensor]:
        """The direction of every block: momentum, orthogonalised; or Adam's without its corrections."""
        directions: list[Tensor] = list(grads)
        momenta = self.find_momenta().unbind()
        for number, group in enumerate(self.table.groups):
            numbers = [k for k in self.table.matrices if self.table.group_of[k] == number]
            if numbers:
                buffers, gs = self._find_state(numbers, "momentum_buffer"), [grads[k] for k in numbers]
                kept = [momenta[self.table.owners.index(k)].to(gs[0].dtype) for k in numbers]
                foreach("mul_", buffers, kept)
                foreach("add_", buffers, gs)
                ds = foreach("add", gs, foreach("mul", buffers, kept)) if group["nesterov"] else buffers
                for k, d in zip(numbers, ds, strict=True):
                    directions[k] = d
            numbers = [k for k in self.table.others if self.table.group_of[k] == number]
            if numbers:
                first, second = group["betas"]
                means, squares = self._find_state(numbers, "exp_avg"), self._find_state(numbers, "exp_avg_sq")
                gs = [grads[k].to(mean.dtype) for k, mean in zip(numbers, means, strict=True)]
                foreach("lerp_", means, gs, 1 - first)
                foreach("mul_", squares, second)
                foreach("addcmul_", squares, gs, gs, 1 - second)
                roots = foreach("sqrt", squares)
                foreach("add_", roots, group["eps"])
                for k, d in zip(numbers, foreach("div", means, roots), strict=True):
                    directions[k] = d.to(grads[k].dtype)
        ds = self.table.cut(directions)
        blocks = [self.table.blocks[k] for k in self.table.orthogonal]
        moments = [ds[k] for k in self.table.orthogonal]
        for k, d in zip(
            self.table.orthogonal, on_whole_blocks(blocks, moments, orthogonalize_all), strict=True
        ):
            ds[k] = d
        return ds

    def _find_state(self, numbers: list[int], key: str) -> list[Tensor]:
        return [local_part(self.state[self.table.moved[k]][key]) for k in numbers]

    def find_momenta(self) -> Tensor:
        """The momentum of each block."""
        return (1 - 1 / (2 + self.growth[2] / REACH)).clamp(max=self.table.find_option("momentum"))

    def decide(self, products: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Updates the averages of growth, and finds how far each block goes in its direction D and the factor
        that it is multiplied by then.

        Args:
            products: ``<W, W>``, ``<G, G>``, ``<G, W>``, ``<W, D>`` and ``<D, D>`` of every block.
            eps: the rounding of the weights.
        """
        norms, gradients = products[:2].sqrt()
        along, across, square = products[2:]
        first, second, steps = self.growth
        lr, late = self.table.find_option("lr"), 1 + steps / FALL
        angle, pace = lr * late**-POWER, lr / late
        steps += 1
        correction = (1 - self.table.find_option("betas", 1) ** steps).sqrt() / (
            1 - self.table.find_option("betas", 0) ** steps
        )
        scale = torch.where(
            self.table.is_orthogonal,
            (self.table.numel / torch.where(square > 0, square, 1)).sqrt(),
            correction * self.farther,
        )
        size, turns = self.table.sizes.measure(norms)
        length = angle * size * scale
        length = torch.where(self.table.sizes.find_noise(gradients, NOISE * eps), 0, length)
        moved = (products[0] - 2 * length * across + length.square() * square).clamp(min=0).sqrt()
        # Adam on the logarithm of the norm.
        first.lerp_(along, 1 - GROWTH_BETAS[0])
        speed = self.table.find_option("growth")
        noise = speed * NOISE * eps * gradients  # moves norms by as little, however fast they grow
        second.lerp_(along.square() + noise.square(), 1 - GROWTH_BETAS[1])
        mean = first / (1 - GROWTH_BETAS[0] ** steps)
        root = (second / (1 - GROWTH_BETAS[1] ** steps)).sqrt()
        ascent = mean / torch.where(root > 0, root, 1)
        shrinking = speed * ascent + self.table.find_option("weight_decay")
        growth = torch.exp(-pace * self.table.shares * shrinking)
        turns = turns & (moved > 0)
        return length, torch.where(turns, growth * norms / torch.where(turns, moved, 1), 1)


def _multiply(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """The inner products of all pairs."""
    products = [torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(xs, ys, strict=True)]
    return torch.stack(products).double()
