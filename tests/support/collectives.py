"""Counts what is sent between ranks."""

from __future__ import annotations

from contextlib import contextmanager

import torch.distributed as dist

from pathsgd._torch import ALL_GATHER


@contextmanager
def counted_numbers():
    """Counts the numbers that every collective call sends that Python code asks for."""
    names = (ALL_GATHER, "all_reduce", "broadcast", "all_to_all_single")
    sent = {name: [] for name in names}
    originals = {name: getattr(dist, name) for name in names}

    def counting(name):
        def call(*args, **kwargs):
            sent[name].append(args[name.startswith("all_") and name != "all_reduce"].numel())
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name in names:
            setattr(dist, name, originals[name])
