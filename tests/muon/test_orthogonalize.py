"""Newton-Schulz: singular values near 1 whatever the scale, in the precision that is asked for."""

from __future__ import annotations

import pytest
import torch

from pathsgd.muon import orthogonalize as module
from pathsgd.muon.orthogonalize import (
    iterate,
    iterate_gram,
    make_diagonal,
    orthogonalize,
    orthogonalize_all,
)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 40), (2, 40, 8), (1, 1, 5), (1, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_are_near_one(shape, dtype):
    """Five iterations take small ones up by 3.4^5 at most: under 1/200 of the norm they are not there yet."""
    matrices = torch.randn(shape, dtype=dtype)
    result = orthogonalize(matrices, dtype)
    assert result.dtype == dtype
    before, values = torch.linalg.svdvals(matrices), torch.linalg.svdvals(result)
    there = before > before.norm(dim=1, keepdim=True) / 200
    assert there.sum() >= 0.9 * there.numel()
    assert 0.6 < values[there].min() <= values.max() < 1.3


def test_singular_vectors_stay():
    matrix = torch.randn(6, 4, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ orthogonalize(matrix[None], torch.float64)[0] @ vh.mT
    torch.testing.assert_close(inner, inner.diagonal().diag(), rtol=0, atol=1e-12)
    assert (inner.diagonal() > 0.6).all()


@pytest.mark.parametrize("shape", [(4, 6), (180, 200)])
def test_zeros_stay_zeros_beside_others(shape):
    batch = torch.stack([torch.zeros(shape), torch.randn(shape)])
    result = orthogonalize(batch, torch.float32)
    assert torch.equal(result[0], torch.zeros(shape))
    assert torch.equal(result[1], orthogonalize(batch[1:], torch.float32)[0])


@pytest.mark.parametrize("exponent", [-100, -120, 100])
@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 180, 200)])
def test_scale_does_not_matter(exponent, shape):
    """To the last bit for powers of two, also where squares leave the range of fp32 (2^-100 is 1e-30)."""
    matrices = torch.randn(shape)
    matrices.mul_(matrices.abs() > 2.0**-6)  # less, times 2^-120, is rounded
    scaled = matrices * 2.0**exponent
    assert torch.equal(orthogonalize(scaled, torch.float32), orthogonalize(matrices, torch.float32))


def test_half_precision_is_asked_for():
    matrices = torch.randn(1, 8, 8)
    rough, exact = orthogonalize(matrices, torch.bfloat16), orthogonalize(matrices, torch.float32)
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, exact)
    assert (rough - exact).norm() < 0.1 * exact.norm()


def test_the_result_can_go_where_the_matrices_were():
    matrices = torch.randn(2, 6, 9)
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True)
    expected = iterate(x, make_diagonal(x))
    assert iterate(x, make_diagonal(x), out=x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rank", [64, 20])
def test_by_gram_matrices_it_is_the_same(rank, wide):
    """In fp32 up to what squaring small singular values rounds; on a GPU fp16 rounds by 1e-3."""
    x = torch.randn(2, 160, rank, dtype=torch.float64) @ torch.randn(2, rank, 64, dtype=torch.float64)
    x = x.mT if wide else x
    x /= x.norm(dim=(1, 2), keepdim=True)
    expected = iterate(x, make_diagonal(x))
    torch.testing.assert_close(iterate_gram(x, make_diagonal(x)), expected, rtol=0, atol=1e-10)
    x = x.float()
    assert (iterate_gram(x, make_diagonal(x)) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("shape", [(2, 200, 64), (1, 80, 300)])
def test_long_matrices_take_gram_matrices(monkeypatch, shape):
    matrices = torch.randn(shape, dtype=torch.float64)
    result = orthogonalize(matrices, torch.float64)
    monkeypatch.setattr(module, "LONG", 1000)
    expected = orthogonalize(matrices, torch.float64)
    assert not torch.equal(result, expected)  # the order of the sums is another one
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


def test_half_precision_rounds_no_coefficient():
    """Rounded, 3.4445 would take singular values away by 5e-3 and more."""
    matrices = torch.randn(2, 64, 200)
    rough, exact = orthogonalize(matrices, torch.float16), orthogonalize(matrices, torch.float32)
    assert (rough - exact).norm() < 4e-3 * exact.norm()


def test_with_another_blas_it_is_the_same(monkeypatch):
    """One that is slow for wide matrices."""
    matrices = torch.randn(2, 30, 200, dtype=torch.float64)
    result = []
    for available in (True, False):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda available=available: available)
        result.append(orthogonalize(matrices, torch.float64))
    torch.testing.assert_close(*result, rtol=0, atol=1e-12)


def test_blocks_of_one_shape_are_computed_together_and_as_each_alone():
    """Their entries have root mean square 1; kernels are matrices of all their places."""
    blocks = [
        torch.randn(4, 6),
        torch.randn(3, 2, 2),
        torch.randn(4, 6),
        torch.zeros(4, 6),
        torch.randn(3, 4),
    ]
    directions = orthogonalize_all(blocks)
    for block, direction in zip(blocks, directions, strict=True):
        assert direction.shape == block.shape
        alone = orthogonalize(block.reshape(1, len(block), -1), torch.float32)[0].reshape(block.shape)
        if block.any():
            alone = alone / alone.square().mean().sqrt()
        torch.testing.assert_close(direction, alone, rtol=1e-5, atol=1e-6)
