"""Path quantities are computed in fp32 or better: TF32, which torch allows in convolutions, is not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 inside, whatever the user allows for the network itself."""
    if torch.compiler.is_compiling():  # a setting cannot change inside a compiled graph
        yield
        return
    settings = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    saved = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, value in zip(settings, saved, strict=True):
            setting.fp32_precision = value
