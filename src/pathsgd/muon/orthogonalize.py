"""Muon's direction: the nearest orthogonal matrix, roughly, by Newton-Schulz."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration that takes all singular values near 1 in five steps."""

STEPS = 5

LONG, LARGE = 2, 64
"""On a CPU matrices with so many times as many rows as columns, or the other way round, and so many of both,
are orthogonalised by their Gram matrices."""

MAX_IN_DOUBLE = 1 << 15
"""Entries up to which a CPU normalises a matrix in fp64, which takes ten times as long as fp32."""


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
    nearest = (iterate_gram if pays else iterate)(x, make_diagonal(x)).to(matrices.dtype)
    return nearest.mT if turned else nearest


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
    """The iteration for long matrices, by products of the size of their Gram matrices: all factors of x are
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
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    in_double = matrices.is_cuda or matrices[0].numel() <= MAX_IN_DOUBLE  # as Newton-Schulz magnifies errors
    largest = matrices.abs().amax((-2, -1), keepdim=True)
    x = matrices.to(torch.float64 if in_double else dtype)
    x = x / torch.where(largest > 0, largest, 1)  # whose squares are in range
    norm = _find_norms(x)
    return (x / torch.where(norm > 0, norm, 1)).to(dtype)


def _find_norms(matrices: Tensor) -> Tensor:
    """Norms, in fp32 at least, with two axes of size one. By rows: a long sum loses digits on a CPU."""
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    rows = torch.linalg.vector_norm(matrices, dim=-1, keepdim=True, dtype=dtype)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)


def orthogonalize_all(blocks: list[Tensor]) -> list[Tensor]:
    """Muon's direction for each of these, of root mean square 1: those of one shape are computed together."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    matrices = [block.reshape(len(block), -1) for block in blocks]
    for k, matrix in enumerate(matrices):
        by_shape.setdefault((matrix.shape[0], matrix.shape[1]), []).append(k)
    directions = list(blocks)
    for (rows, columns), places in by_shape.items():
        batch = torch.stack([matrices[k] for k in places]) if len(places) > 1 else matrices[places[0]][None]
        ds = orthogonalize(batch, choose_dtype(batch))
        norm = _find_norms(ds)
        ds = ds.mul_((rows * columns) ** 0.5 / torch.where(norm > 0, norm, 1))
        for k, d in zip(places, ds.unbind(), strict=True):
            directions[k] = d.reshape(blocks[k].shape)
    return directions
