"""Which implementation a chain gets: each falls back to the next with no loss of meaning."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from pathsgd.graph.chains import Chain
from pathsgd.optim.fused import build, compiled
from pathsgd.optim.fused.blocked import Plain
from pathsgd.optim.fused.compiled import Compiled
from pathsgd.optim.fused.implementation import Implementation, LayerTensors

Choice = Literal["auto", "reference", "blocked", "compiled", "triton"]
Kind = Literal["blocked", "compiled", "triton"]
LOW = (torch.float16, torch.bfloat16)
POWERS = (1, 2, 4)
"""The p whose powers and roots are products and square roots."""


def check_implementation(implementation: object) -> Choice:
    if implementation not in get_args(Choice):
        raise ValueError(
            f"Invalid implementation: {implementation!r} (one of {', '.join(map(repr, get_args(Choice)))})"
        )
    if implementation == "compiled" and not build.available():
        raise ValueError("implementation='compiled' needs a C compiler (cc, gcc, clang or $CC); use 'auto'")
    if implementation == "triton" and not has_triton():
        raise ValueError("implementation='triton' needs the package triton; use 'auto'")
    return implementation  # type: ignore[return-value]


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def implementation_for(choice: Choice, layers: Sequence[LayerTensors]) -> Kind | None:
    """What these layers are moved by; None for the reference, which any layers fit."""
    if choice == "reference" or not _alike(layers):
        return None
    first = layers[0].weight
    if choice == "triton" and not (first.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(
            f"implementation='triton' needs parameters on a GPU, not on {first.device}; use 'auto'"
        )
    if choice == "triton" or (choice == "auto" and first.is_cuda and has_triton()):
        return "triton" if first.dtype in (torch.float32, *LOW) and _biases_in_one_piece(layers) else None
    if first.device.type != "cpu":
        return None
    return "compiled" if choice != "blocked" and compiled.fits(layers) else "blocked"


def make(kind: Kind, chain: Chain, p: int, like: Tensor) -> Implementation:
    if kind == "triton":
        from pathsgd.optim.fused.gpu.triton_chain import OnGpu

        return OnGpu(chain, p, like.device)
    if kind == "compiled":
        return Compiled(p, torch.float32)
    return Plain(p, torch.float32 if like.dtype in LOW else like.dtype)


def _biases_in_one_piece(layers: Sequence[LayerTensors]) -> bool:
    biases = [t for layer in layers for t in (layer.bias, layer.bias_grad) if t is not None]
    return all(t.is_contiguous() for t in biases)


def _alike(layers: Sequence[LayerTensors]) -> bool:
    """One device, one dtype, nothing sparse or complex."""
    tensors = [
        t
        for layer in layers
        for t in (layer.weight, layer.weight_grad, layer.bias, layer.bias_grad)
        if t is not None
    ]
    states = [s for layer in layers for s in (*layer.weight_state, *layer.bias_state)]
    first = tensors[0]
    return (
        all(s.is_contiguous() and s.device == first.device for s in states)
        and first.is_floating_point()
        and all((t.device, t.dtype, t.layout) == (first.device, first.dtype, torch.strided) for t in tensors)
    )
