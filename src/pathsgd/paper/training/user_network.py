"""A network of the user's own: ``--net package.module:make`` or ``--net file.py:make``.

``make(features, classes)`` returns an nn.Module that maps inputs (n, features) to outputs (n, classes). Its
weights are trained as it draws them, and it brings its own dropout.
"""

from __future__ import annotations

import contextlib
import copy
import sys

import torch
from torch import nn

from pathsgd import PathError, PathGraph, trace
from pathsgd.console.user_code import Reference, describe


def is_user_network(net: str) -> bool:
    return ":" in net


def make_user_network(net: str, features: int, classes: int, seed: int) -> tuple[nn.Module, PathGraph]:
    """The network with the weights it draws, on the CPU, and its graph.

    Raises:
        PathError: It cannot be imported, made, called or traced, or its outputs have another shape.
    """
    reference = Reference.parse(net)
    x = torch.zeros(2, features)
    # What it prints must not end up in the JSON.
    with reference.importable(), contextlib.redirect_stdout(sys.stderr), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = copy.deepcopy(reference.make_model(features, classes)).cpu()
        try:
            shape = tuple(copy.deepcopy(model).eval()(x).shape)
        except Exception as error:
            raise PathError(f"{net} on inputs of shape {tuple(x.shape)} raised {describe(error)}") from error
        if shape != (2, classes):
            raise PathError(f"{net} returned outputs of shape {shape}, expected (2, {classes})")
        return model, trace(model, x)
