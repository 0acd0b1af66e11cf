"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .adamw import adamw_of
from .matrices import MatrixOptimizer

Sides = tuple[Tensor | None, Tensor | None]
"""A matrix for the rows and one for the columns; None is the identity, of a side that is too long."""


class SOAP(MatrixOptimizer):
    """SOAP (arXiv 2409.11321) on all tensors of two dimensions or more, head and embeddings too; AdamW at the
    same rate for vectors, which do not decay.

    Defaults are those of the authors' release. As there, the first step only begins the preconditioner, so
    that no gradient is seen in a basis made from it, and the decay comes after the step. Kernels are matrices
    of output channels × the rest; the release keeps all dimensions by default, and with its ``merge_dims``
    merges from the left, which mixes outputs with inputs.
    """

    captured = False
    """Whether a step can be captured in a CUDA graph: every tenth is another, with QR decompositions."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        every: int = 10,
        longest: int = 10000,
    ) -> None:
        params = list(model.parameters())
        vectors = [p for p in params if p.dim() < 2]
        others = [adamw_of(vectors, lr, weight_decay, betas=betas, eps=eps)] if vectors else []
        super().__init__(
            [p for p in params if p.dim() > 1], lr, others, weight_decay=weight_decay, betas=betas, eps=eps,
            every=every, longest=longest,
        )  # fmt: skip

    def move(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        for p, grad in zip(params, grads, strict=True):
            state, g = self.state[p], grad.flatten(1)
            if not state:
                grams = _grams(g, group["longest"])
                # From zero, as the release has it; only the direction of the averages counts.
                state["grams"] = [gram if gram is None else gram * (1 - beta2) for gram in grams]
                state["bases"] = [gram if gram is None else _eigenbasis(gram) for gram in state["grams"]]
                state["average"], state["square"] = torch.zeros_like(g), torch.zeros_like(g)
                state["step"] = 0
                continue
            state["step"] += 1
            average, square = state["average"], state["square"]
            average.lerp_(g, 1 - beta1)
            turned = _turn(g, state["bases"])
            square.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
            step = _turn(average, state["bases"]) / (square.sqrt() + group["eps"])
            correction = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
            back = _turn(step, [basis if basis is None else basis.mT for basis in state["bases"]])
            p -= back.view_as(p) * (correction * group["lr"])
            p *= 1 - group["lr"] * group["weight_decay"]
            for gram, new in zip(state["grams"], _grams(g, group["longest"]), strict=True):
                if gram is not None:
                    gram.lerp_(new, 1 - beta2)
            if state["step"] % group["every"] == 0:
                _refresh(state)


def _grams(g: Tensor, longest: int) -> Sides:
    rows, columns = g.shape
    return (g @ g.mT if rows <= longest else None), (g.mT @ g if columns <= longest else None)


def _eigenbasis(gram: Tensor) -> Tensor:
    """Eigenvectors, that of the largest eigenvalue first."""
    try:
        vectors = torch.linalg.eigh(gram).eigenvectors
    except torch.linalg.LinAlgError:  # in fp32, of rows that were mostly not seen; as in the release
        vectors = torch.linalg.eigh(gram.double()).eigenvectors.to(gram.dtype)
    return vectors.flip(1)


def _turn(matrix: Tensor, bases: Sequence[Tensor | None]) -> Tensor:
    """The matrix in coordinates of the bases."""
    left, right = bases
    if left is not None:
        matrix = left.mT @ matrix
    return matrix if right is None else matrix @ right


def _refresh(state: dict[str, Any]) -> None:
    """One step of the power iteration for each basis; second moments follow the order of its vectors."""
    for side, (gram, basis) in enumerate(zip(state["grams"], state["bases"], strict=True)):
        if gram is not None:
            product = gram @ basis
            order = (basis * product).sum(0).argsort(descending=True)
            state["square"] = state["square"].index_select(side, order)
            state["bases"][side] = torch.linalg.qr(product[:, order]).Q
