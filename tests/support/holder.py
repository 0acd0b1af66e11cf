"""A model that writes to what it holds, and whether a trace leaves it as it was."""

from __future__ import annotations

import contextlib
from collections import deque

import pytest
import torch
from torch import nn

import pathsgd


class Holder(nn.Module):
    """Holds a value, which ``write`` changes in the middle of its forward."""

    def __init__(self, held, write, fails):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.held, self.write, self.fails = held, write, fails
        self.last = None

    def forward(self, x):
        y = self.a(x).relu()
        self.write(self, y)
        if self.fails:
            raise ValueError("as it should")
        return self.b(y)


WRITTEN = []
"""What a trace has run: a global, as what the model refers to is put back."""


def trace(held, write, fails):
    """The model after a trace, which has to have run ``write``."""
    WRITTEN.clear()
    model = Holder(held, lambda model, y: WRITTEN.append(write(model, y)), fails)
    before = contents(model)
    with pytest.raises(pathsgd.TraceError, match="as it should") if fails else contextlib.nullcontext():
        pathsgd.trace(model, torch.randn(2, 4))
    assert WRITTEN
    assert_same(contents(model), before)
    return model


def contents(value, seen=()):
    """All that a value holds, in its order, and what that holds."""
    if id(value) in seen or isinstance(value, (type, str, int)):
        return []
    items = []
    if isinstance(value, (list, tuple, set, deque)):
        items += value
    elif isinstance(value, dict):
        items += [x for pair in value.items() for x in pair]
    for base in type(value).__mro__:
        for slot in vars(base).get("__slots__", ()):
            items.append(getattr(value, f"_{base.__name__}{slot}" if slot[:2] == "__" else slot, None))
    for pair in getattr(value, "__dict__", {}).items():
        items += pair
    return items + [x for item in items for x in contents(item, (*seen, id(value)))]


def assert_same(found, expected):
    assert [id(x) for x in found] == [id(x) for x in expected]


class Cache:
    def __init__(self):
        self.keys, self.length = [], 0

    def write(self, y):
        self.keys.append(y)
        self.length += 1
        self.newest = y
