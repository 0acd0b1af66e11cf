"""Muon's direction for relative steps: orthogonalised for matrices, Adam's for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import Optimizer

from pathsgd.geometry.extended_float import exact_ldexp
from pathsgd.geometry.sharded import local_part
from pathsgd.optim.fused.torch_rules import can_be_fused
from pathsgd.optim.relative import sums
from pathsgd.optim.relative.blocks import Block
from pathsgd.optim.relative.sharded import on_whole_blocks
from pathsgd.optim.rule import apply_momentum, multi_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration that takes all singular values near 1 in five steps."""


STEPS = 5

LONG, LARGE = 2, 64
"""On a CPU matrices with so many times as many rows as columns, or the other way round, and so many of both,
are orthogonalised by their Gram matrices."""


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest (semi-)orthogonal matrix of each in a batch, roughly, by Newton-Schulz."""
    x = _normalize(matrices).to(dtype)
    if x.is_cuda:
        return iterate(x, make_diagonal(x)).to(matrices.dtype)
    # OpenBLAS takes up to three times as long for x x^T as for x^T x, MKL as long.
    turned = x.shape[-2] < x.shape[-1] and not torch.backends.mkl.is_available()
    x = x.mT.contiguous() if turned else x
    short, long = sorted(x.shape[-2:])
    pays = short >= LARGE and long >= LONG * short and dtype.itemsize >= 4
    found = (iterate_gram if pays else iterate)(x, make_diagonal(x)).to(matrices.dtype)
    return found.mT if turned else found


def iterate(x: Tensor, diagonal: Tensor, out: Tensor | None = None) -> Tensor:
    """The iteration alone, on matrices of norm 1 or 0.

    Args:
        x: a batch of them.
        diagonal: what :func:`make_diagonal` makes of it.
        out: where the result goes; it may be x.
    """
    _, b, c = COEFFICIENTS
    tall = x.shape[-2] >= x.shape[-1]
    for step in range(STEPS):
        gram = x.mT @ x if tall else x @ x.mT
        # a + b gram + c gram^2, since adding a x to a product would copy all of x.
        polynomial = torch.add(diagonal, gram, alpha=b, out=torch.empty_like(gram))
        polynomial.baddbmm_(gram, gram, alpha=c)
        factors = (x, polynomial) if tall else (polynomial, x)
        x = torch.bmm(*factors, out=out if step == STEPS - 1 else None)
    return x


def iterate_gram(x: Tensor, diagonal: Tensor) -> Tensor:
    """The same for long matrices, by products of the size of their Gram matrices: all factors of x are
    polynomials of the first one."""
    _, b, c = COEFFICIENTS
    tall = x.shape[-2] >= x.shape[-1]
    gram = factor = x.mT @ x if tall else x @ x.mT
    for step in range(STEPS):
        polynomial = torch.baddbmm(diagonal + b * gram, gram, gram, alpha=c)
        factor = factor @ polynomial if step else polynomial
        if step < STEPS - 1:
            gram = polynomial @ gram @ polynomial
    return x @ factor if tall else factor @ x


def choose_dtype(x: Tensor) -> torch.dtype:
    """That of the iteration. On a GPU it is fp16 for fp32: matrices of norm 1 are within its range, and bf16
    rounds eight times as much. On a CPU products in 16 bits may take hundreds of times as long."""
    if x.is_cuda:
        return torch.float16 if x.dtype in (torch.float32, torch.bfloat16) else x.dtype
    return torch.promote_types(x.dtype, torch.float32)


def make_diagonal(x: Tensor) -> Tensor:
    """The constant term of the polynomial, for matrices of this shape and dtype; not rounded to fp16."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return COEFFICIENTS[0] * torch.eye(min(x.shape[-2:]), dtype=dtype, device=x.device)


def _normalize(matrices: Tensor) -> Tensor:
    """Each of norm 1, or 0, to the same bits however it is scaled by a power of two."""
    if matrices.is_cuda or matrices[0].numel() <= sums.LARGE:
        # In fp64: Newton-Schulz magnifies what is rounded. Large ones would take long on a CPU.
        largest = matrices.abs().amax((-2, -1), keepdim=True)
        x = matrices.double() / torch.where(largest > 0, largest, 1)  # whose squares are in range
        norm = _find_norms(x)
        return (x / torch.where(norm > 0, norm, 1)).to(matrices.dtype)
    norm = _find_norms(matrices)
    if not bool(((norm > sums.LEAST) & (norm < 1 / sums.LEAST)).all()):
        exponent = torch.frexp(matrices.abs().amax((-2, -1), keepdim=True)).exponent
        matrices = exact_ldexp(matrices, -exponent)
        norm = _find_norms(matrices)
    return matrices / torch.where(norm > 0, norm, 1)


def _find_norms(matrices: Tensor) -> Tensor:
    """Of each, in fp32 at least, with two axes of size one. By rows: a long sum loses digits on a CPU."""
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    rows = torch.linalg.vector_norm(matrices, dim=-1, keepdim=True, dtype=dtype)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)


def orthogonalize_all(blocks: list[Tensor]) -> list[Tensor]:
    """Muon's direction for each of these, of root mean square 1: those of one shape are computed together."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    matrices = [block.reshape(len(block), -1) for block in blocks]
    for k, matrix in enumerate(matrices):
        by_shape.setdefault((matrix.shape[0], matrix.shape[1]), []).append(k)
    found = list(blocks)
    for (rows, columns), places in by_shape.items():
        batch = torch.stack([matrices[k] for k in places]) if len(places) > 1 else matrices[places[0]][None]
        ds = orthogonalize(batch, choose_dtype(batch))
        norm = _find_norms(ds)
        ds = ds.mul_((rows * columns) ** 0.5 / torch.where(norm > 0, norm, 1))
        for k, d in zip(places, ds.unbind(), strict=True):
            found[k] = d.reshape(blocks[k].shape)
    return found


def is_orthogonal(blocks: list[Block]) -> bool:
    """Whether the direction of a parameter with these blocks is orthogonalised."""
    return bool(blocks) and all(block.orthogonal for block in blocks)


def find_momentum(state: dict[str, Tensor], p: Tensor) -> Tensor:
    """The momentum of a parameter, made at its first step."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(p)
    return state["momentum_buffer"]


def find_averages(state: dict[str, Tensor], p: Tensor) -> dict[str, Tensor]:
    """Adam's state of a parameter, made at its first step; the number of steps is on a GPU, too, so that
    steps can be captured in a CUDA graph."""
    if "exp_avg" not in state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    if p.is_cuda and not state["step"].is_cuda:
        state["step"] = state["step"].to(p.device)
    return state


def _subtract_(u: Tensor, d: Tensor, lr: float | Tensor) -> None:
    u.sub_(lr * d) if isinstance(lr, Tensor) else u.sub_(d, alpha=lr)


class RelativeMuon(Optimizer):
    """On parameters whose blocks have root mean square 1: a step is ``lr`` in the same measure.

    Decay is that of the relative step, not of this.
    """

    blocks_of: Callable[[Tensor], list[Block]]
    runs_on_device = True
    """So that a step can be captured in a CUDA graph."""

    def __init__(
        self, params: Any, lr: float | Tensor, momentum: float, nesterov: bool, betas: tuple[float, float],
        eps: float, weight_decay: float,
    ) -> None:  # fmt: skip
        for name, value in (
            ("learning rate", lr),
            ("momentum", momentum),
            ("eps", eps),
            ("weight_decay", weight_decay),
        ):
            if not value >= 0:
                raise ValueError(f"Invalid {name} value: {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Invalid betas: {betas}")
        options = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "betas": betas, "eps": eps,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, options)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "blocks_of"}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            matrices = [p for p in params if is_orthogonal(self.blocks_of(p))]
            chosen = set(map(id, matrices))
            self._step_matrices(group, matrices)
            self._step_adam(group, [p for p in params if id(p) not in chosen])
        return loss

    def _step_matrices(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if not params:
            return
        # In fp32 at least: torch rounds such a sum in bf16 otherwise for a shard than for the whole.
        grads = [local_part(p.grad) for p in params if p.grad is not None]
        grads = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
        buffers = [local_part(find_momentum(self.state[p], p)) for p in params]
        ds, _ = apply_momentum(grads, buffers, group["momentum"], group["nesterov"], multi_tensor)
        blocks = [(block, p, d) for p, d in zip(params, ds, strict=True) for block in self.blocks_of(p)]
        found = on_whole_blocks(
            [block for block, *_ in blocks], [block.of(d) for block, _, d in blocks], orthogonalize_all
        )
        for (block, p, _), d in zip(blocks, found, strict=True):
            _subtract_(block.of(local_part(p)), d, group["lr"])

    def _step_adam(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if not params:
            return
        states = [find_averages(self.state[p], p) for p in params]
        first, second = group["betas"]
        grads = [local_part(p.grad) for p in params if p.grad is not None]
        fused = all(can_be_fused(p, state) for p, state in zip(params, states, strict=True))
        adam(
            [*map(local_part, params)], grads, [local_part(s["exp_avg"]) for s in states],
            [local_part(s["exp_avg_sq"]) for s in states], [], [s["step"] for s in states], amsgrad=False,
            beta1=first, beta2=second, lr=group["lr"], weight_decay=0.0, eps=group["eps"], maximize=False,
            capturable=all(p.is_cuda for p in params), fused=fused or None,
        )  # fmt: skip
