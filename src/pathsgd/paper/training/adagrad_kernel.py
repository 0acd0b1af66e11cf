"""AdaGrad on a GPU in one pass over the memory, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _adagrad_kernel(w_ptr, g_ptr, sum_ptr, count, lr, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    g = tl.load(g_ptr + at, mask, 0.0)
    total = tl.load(sum_ptr + at, mask, 0.0) + g * g
    tl.store(sum_ptr + at, total, mask)
    w = tl.load(w_ptr + at, mask, 0.0)
    tl.store(w_ptr + at, w - lr * (g / (tl.sqrt_rn(total) + eps)), mask)


def apply_adagrad(w: Tensor, g: Tensor, total: Tensor, lr: float, eps: float) -> None:
    """``total += g^2`` and ``w -= lr g / (sqrt(total) + eps)``, in place, of fp32 tensors in one piece."""
    _adagrad_kernel[(triton.cdiv(w.numel(), BLOCK),)](w, g, total, w.numel(), lr, eps, BLOCK=BLOCK)
