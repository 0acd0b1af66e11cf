"""Path quantities are computed in fp32 or better, whatever the network itself is run in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from pathsgd import _torch


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Neither autocast nor TF32 (which torch allows in convolutions) inside.

    Convolutions are at batch one here, for which cudnn's first choice is often a bad one: it may try.
    """
    if _torch.is_compiling():  # settings cannot change inside a compiled graph
        yield
        return
    off = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else _NOTHING
    with off:
        if device.type == "cpu":
            yield
        else:
            with _SETTINGS:
                yield


class _Settings(contextlib.AbstractContextManager[None]):
    """torch's settings are those of the process: the first thread that comes in changes them, and the last
    that goes out puts them back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._tried = False
        self._saved: list[str] = []

    @property
    def _kinds(self) -> tuple[object, ...]:
        return (torch.backends.cudnn.conv, torch.backends.cuda.matmul)  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._saved = [kind.fp32_precision for kind in self._kinds]  # type: ignore[attr-defined]
                self._tried = _torch.get_cudnn_benchmark()
                fixed = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
                _torch.set_cudnn_benchmark(self._tried or not fixed)
                for kind in self._kinds:
                    kind.fp32_precision = "ieee"  # type: ignore[attr-defined]
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _torch.set_cudnn_benchmark(self._tried)
                for kind, value in zip(self._kinds, self._saved, strict=True):
                    kind.fp32_precision = value  # type: ignore[attr-defined]


_SETTINGS = _Settings()
_NOTHING = contextlib.nullcontext()
