"""Path quantities are computed in fp32 or better, whatever the network itself is run in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Neither autocast nor TF32 (which torch allows in convolutions) inside.

    Convolutions are at batch one here, for which cudnn's first choice is often a bad one: it may try.
    """
    if torch.compiler.is_compiling():  # settings cannot change inside a compiled graph
        yield
        return
    settings = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    saved = [setting.fp32_precision for setting in settings]
    tried = torch._C._get_cudnn_benchmark()
    fixed = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    try:
        # Not through torch.backends, where setting a flag may have been frozen.
        torch._C._set_cudnn_benchmark(tried or not fixed)
        for setting in settings:
            setting.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch._C._set_cudnn_benchmark(tried)
        for setting, value in zip(settings, saved, strict=True):
            setting.fp32_precision = value
