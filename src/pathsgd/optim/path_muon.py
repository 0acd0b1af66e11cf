"""Muon in the geometry of paths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example
from pathsgd.optim.path_normalized import PathNormalized
from pathsgd.optim.relative.muon import RelativeMuon


class PathMuon(PathNormalized):
    """Muon with relative steps: one learning rate for every network, whatever the scaling of its units.

    Every matrix and kernel turns by an angle of ``lr`` in the direction of its orthogonalised momentum; rows
    that are used apart, as queries, keys and values in one matrix, turn apart. Embeddings, the last
    layer, biases and the weights of norms take Adam's direction. All of it happens in coordinates that a
    rescaling of units does not change, see :class:`pathsgd.PathNormalized`.

    Momentum is orthogonalised in the precision of the model; on a GPU in fp16 if that is fp32 or bf16.

    Args:
        model: the module to train; or its parameters in any form torch takes, with ``graph``.
        example_input: a tensor, a tuple of inputs or a dict of keyword inputs of the model; only shapes
            matter. May be left out: the model is then traced from the first batch it sees.
        lr: the angle of a step, in radians; of the other parameters, the step relative to their size. By
            default 0.06; if there is no schedule, it falls after 100 steps.
        momentum: momentum factor of what is orthogonalised.
        nesterov: Nesterov momentum.
        betas: decay rates of Adam's running averages.
        eps: added to Adam's denominator. Gradients are by u, so it means the same for every rescaling.
        weight_decay: decoupled decay of the norms of matrices and kernels.
        p: the order of the path norm.
        **options: the other options of :class:`pathsgd.PathNormalized`.

    Raises:
        ValueError: an option is out of its range.
        TypeError: parameters were passed without the graph of their model.
        TraceError: the model cannot be traced.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = PathMuon(model)
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
        p: float = 2,
        **options: Any,
    ) -> None:
        super().__init__(
            RelativeMuon, model, example_input, p=p, relative=True, lr=self.default_lr if lr is None else lr,
            momentum=momentum, nesterov=nesterov, betas=betas, eps=eps, weight_decay=weight_decay, **options,
        )  # fmt: skip
        if lr is None:
            self._lower_rate()

    def _share(self, base: Optimizer) -> None:
        super()._share(base)
        if isinstance(base, RelativeMuon):
            base.blocks_of = self._relative.blocks_of
