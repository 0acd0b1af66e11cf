"""The formula of optim/rule.py, or AdaGrad's, or Adam's, in Triton, for every kernel that moves weights.

Kernels are compiled without contraction of products and sums (see OPTIONS): of ``a b + c d`` the compiler
fuses either product, in one kernel this one and in the next that one, and gammas that were carried would not
be those that are summed anew after a resume. What is to be fused is written as ``tl.fma``.
"""

import math

import triton
import triton.language as tl

from pathsgd.optim.rule import Rule

SGD: tl.constexpr = tl.constexpr(0)
MOMENTUM: tl.constexpr = tl.constexpr(1)
ADAGRAD: tl.constexpr = tl.constexpr(2)
ADAM: tl.constexpr = tl.constexpr(3)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Of the compiler, for every launch."""
QUICK_FROM = 2.0**-34
"""The eps from which an approximate quotient is as good as an exact one; torch's defaults are larger."""


def find_method(rule: Rule) -> int:
    """SGD, MOMENTUM, ADAGRAD or ADAM."""
    return {"sgd": rule.state_count, "adagrad": 2, "adam": 3}[rule.method]


def find_numbers(rule: Rule) -> tuple[float, ...]:
    """What a kernel is told of a rule: momentum, lr_decay, and Adam's betas and eps."""
    averages = (x for beta in rule.betas for x in (beta, 1 - beta, math.log(beta) if beta > 0 else -math.inf))
    return (rule.momentum, rule.lr_decay, *averages, rule.eps)


@triton.jit
def find_rates(lr, step, weight_decay, lr_decay, log_first, log_second, METHOD: tl.constexpr):
    """(learning rate, factor of sqrt(v), factor of the weight) of a step."""
    rate, correction = lr, 1.0
    if METHOD == ADAGRAD:
        rate = lr / (1.0 + (step - 1.0) * lr_decay)
    if METHOD == ADAM:
        # In fp64, since 1 - beta^step cancels.
        count = (step + lr * 0.0).to(tl.float64)
        rate = lr / (1.0 - tl.exp(count * log_first)).to(tl.float32)
        correction = 1.0 / tl.sqrt((1.0 - tl.exp(count * log_second)).to(tl.float32))
    return rate, correction, 1.0 - lr * weight_decay


@triton.jit
def divide_by_root(a, square, correction, eps, QUICK: tl.constexpr):
    """``a / (sqrt(square) correction + eps)``.

    QUICK takes a third of the instructions, which a GPU notices here, and is exact to a few units in the last
    place. Its root takes subnormal squares for zero, of which nothing is left beside an eps that is not tiny.
    """
    if QUICK:
        root = tl.rsqrt(tl.fma(tl.sqrt(square), correction, eps))
        return a * root * root
    return a / (tl.sqrt_rn(square) * correction + eps)


@triton.jit
def update(
    w, g, m, v, root, rate, correction, shrink, coupled, momentum, first, rest_first, second, rest_second,
    eps, METHOD: tl.constexpr, NESTEROV: tl.constexpr, DECAY: tl.constexpr, MAXIMIZE: tl.constexpr,
    QUICK: tl.constexpr,
):  # fmt: skip
    """(new weight, new state), given ``root = 1 / sqrt(gamma)``."""
    h = g * root
    if MAXIMIZE:
        h = -h
    live = root > 0
    if DECAY == "coupled":
        h += coupled * tl.where(live, w / tl.where(live, root, 1.0), 0.0)
    if METHOD == MOMENTUM:
        m = tl.fma(momentum, m, h)
        if NESTEROV:
            h = tl.fma(momentum, m, h)
        else:
            h = m
    if METHOD == ADAGRAD:
        m = tl.fma(h, h, m)
        h = divide_by_root(h, m, 1.0, eps, QUICK)
    if METHOD == ADAM:
        m = tl.fma(first, m, rest_first * h)
        v = tl.fma(second, v, rest_second * (h * h))
        h = divide_by_root(m, v, correction, eps, QUICK)
    if DECAY == "all":
        w = w * shrink
    if DECAY == "live":
        w = w * tl.where(live, shrink, 1.0)
    return tl.fma(-rate, h * root, w), m, v


@triton.jit
def load_weights(w_at, g_at, m_at, v_at, mask, METHOD: tl.constexpr):
    """(weight, gradient, state) of weights or biases."""
    w = tl.load(w_at, mask, 0.0)
    # Gradients are not read again: the cache is better kept for the weights.
    g = tl.load(g_at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
    m, v = g, g
    if METHOD != SGD:
        m = tl.load(m_at, mask, 0.0).to(tl.float32)
    if METHOD == ADAM:
        v = tl.load(v_at, mask, 0.0).to(tl.float32)
    return w, g, m, v


@triton.jit
def store_weights(w_at, m_at, v_at, mask, w, m, v, METHOD: tl.constexpr):
    """Stores weights and state; returns the weights as stored, which rounds them."""
    if METHOD != SGD:
        tl.store(m_at, m.to(m_at.dtype.element_ty), mask)
    if METHOD == ADAM:
        tl.store(v_at, v.to(v_at.dtype.element_ty), mask)
    stored = w.to(w_at.dtype.element_ty)
    tl.store(w_at, stored, mask)
    return stored.to(tl.float32)
