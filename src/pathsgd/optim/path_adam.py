"""Adam and AdaGrad in the geometry of paths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example
from pathsgd.optim.path_normalized import PathNormalized


class PathAdam(PathNormalized):
    """:class:`torch.optim.AdamW` with relative steps: one learning rate for every network, whatever the
    scaling of its units.

    Every matrix and kernel turns in Adam's direction, in coordinates that a rescaling of units does not
    change, see :class:`pathsgd.PathNormalized`. The step has the spectral norm of a step of
    :class:`pathsgd.PathMuon` at the same ``lr``. For Adam on ``h`` with absolute steps take
    ``PathNormalized(torch.optim.Adam, model, example_input)``.

    Args:
        model: the module to train; or its parameters in any form torch takes, with ``graph``.
        example_input: a tensor, a tuple of inputs or a dict of keyword inputs of the model; only shapes
            matter. May be left out: the model is then traced from the first batch it sees.
        lr: the step relative to what it moves. By default 0.08; if there is no schedule, it falls after
            100 steps.
        betas: decay rates of the running averages of the gradient and of its square.
        eps: added to the denominator. Gradients are by u, so it means the same for every rescaling.
        weight_decay: decoupled decay.
        p: the order of the path norm.
        **options: the other options of :class:`torch.optim.AdamW` and of :class:`pathsgd.PathNormalized`.

    Raises:
        ValueError: an option is out of its range.
        TypeError: parameters were passed without the graph of their model.
        TraceError: the model cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = PathAdam(model)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    default_lr = 0.08

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        example_input: Example | PathGraph | None = None,
        lr: float | Tensor | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        p: float = 2,
        **options: Any,
    ) -> None:
        super().__init__(
            torch.optim.AdamW, model, example_input, lr=self.default_lr if lr is None else lr, betas=betas,
            eps=eps, weight_decay=weight_decay, p=p, **{"relative": True, **options},
        )  # fmt: skip
        if lr is None and self.relative:
            self._lower_rate()


class PathAdagrad(PathNormalized):
    """:class:`torch.optim.Adagrad` on the gradient in invariant coordinates.

    Args:
        model: the module to train; or its parameters in any form torch takes, with ``graph``.
        example_input: a tensor, a tuple of inputs or a dict of keyword inputs of the model; only shapes
            matter. May be left out: the model is then traced from the first batch it sees.
        lr: step size.
        lr_decay: how fast the step size decays.
        weight_decay: decay of z, added to its gradient.
        initial_accumulator_value: what the sum of squares starts from.
        eps: added to the denominator.
        p: the order of the path norm.
        **options: the other options of :class:`torch.optim.Adagrad` and of :class:`pathsgd.PathNormalized`.

    Raises:
        ValueError: an option is out of its range.
        TypeError: parameters were passed without the graph of their model.
        TraceError: the model cannot be traced.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = PathAdagrad(model, lr=1e-2)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        example_input: Example | PathGraph | None = None,
        lr: float | Tensor = 1e-2,
        *,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        p: float = 2,
        **options: Any,
    ) -> None:
        super().__init__(
            torch.optim.Adagrad, model, example_input,
            lr=lr, lr_decay=lr_decay, weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value, eps=eps, p=p, **options,
        )  # fmt: skip
