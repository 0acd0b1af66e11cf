"""The network of a run before its first step."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import torch
from torch import nn

from pathsgd import PathError, PathGraph, trace, unbalance
from pathsgd.console.networks import stack
from pathsgd.paper.config import Run, Study
from pathsgd.paper.data.dataset import Dataset
from pathsgd.paper.training.training_data import TrainingData
from pathsgd.paper.training.user_network import is_user_network, make_user_network

Shape = tuple[int, ...]


def make_initial_network(run: Run, data: TrainingData) -> tuple[nn.Module, PathGraph]:
    """The network with its initial weights, on the CPU, and its graph."""
    model: nn.Module
    if is_user_network(run.net):
        model, graph = make_user_network(run.net, math.prod(data.shape), data.classes, run.seed.init)
    else:
        model = make_network(run.net, data.shape, run.hidden, data.classes)
        graph = trace_network(run, data)
        initialise(model, torch.Generator().manual_seed(run.seed.init))
    if run.init != "balanced":
        generator = torch.Generator().manual_seed(run.seed.rescaling)
        unbalance(model, graph, generator=generator, powers_of_two=run.init == "powers-of-two")
    return model, graph


def count_weights(config: Run | Study, data: Dataset) -> int:
    """The number of weights of a network; of mlp and conv without biases."""
    if is_user_network(config.net):
        model, _ = make_user_network(config.net, data.features, data.classes, 0)
        return sum(parameter.numel() for parameter in model.parameters())
    widths = (data.features, *config.hidden, data.classes)
    return sum(math.prod(pair) for pair in pairwise(widths))


def make_network(net: str, shape: Shape, hidden: Shape, classes: int) -> nn.Sequential:
    """A network on flat inputs, with any weights."""
    if net == "conv":
        return _make_conv_net(shape, hidden, classes)
    return stack(math.prod(shape), *hidden, classes)


def _make_conv_net(shape: Shape, hidden: Shape, classes: int) -> nn.Sequential:
    """Convolutions with pooling and a linear hidden layer; ``hidden`` are their channels and its units."""
    if len(shape) != 3:
        raise PathError(f"convolutions need images; these inputs have shape {shape}")
    channels, height, width = shape
    layers: list[nn.Module] = [nn.Unflatten(1, shape)]
    for out in hidden[:-1]:
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = out, height // 2, width // 2
    if not height or not width:
        raise PathError(f"images of {shape[1]}x{shape[2]} are too small for {len(hidden) - 1} poolings by 2")
    layers += [nn.Flatten(), nn.Linear(channels * height * width, hidden[-1]), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], classes))


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """The paper's balanced weights: N(0, 1/fan_in), and biases 0."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.zero_()
        else:
            fan_in = math.prod(parameter.shape[1:])
            parameter.normal_(0, 1 / math.sqrt(fan_in), generator=generator)


def trace_network(run: Run, data: TrainingData | Dataset) -> PathGraph:
    """The graph of a run's network, traced once for all runs with the same one.

    Call it before runs are trained in threads: a trace changes settings of the whole process meanwhile, and
    with them how products are rounded.
    """
    return _trace(run.net, data.shape, run.hidden, data.classes)


@functools.cache
def _trace(net: str, shape: Shape, hidden: Shape, classes: int) -> PathGraph:
    return trace(make_network(net, shape, hidden, classes), torch.zeros(1, math.prod(shape)))
