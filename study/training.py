"""Training of one network: its data, its initial weights, its epochs; and the time of a step."""

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from pathsgd import PathError, PathGraph, PathSGD, trace, unbalance
from study.config import Run, Study
from study.data import Dataset
from study.files import device_name
from study.methods import find_method
from study.runs import DataInfo, StepCost

EVALUATED_AT_ONCE = 10_000


@dataclass(frozen=True)
class TrainingData:
    """Points to train on and to evaluate on, on the device. Inputs are flat."""

    classes: int
    train_x: Tensor
    train_y: Tensor
    evaluated_x: Tensor
    evaluated_y: Tensor


def check_enough_points(data: Dataset, run: Run) -> None:
    left = len(data.train_y) - run.validation
    if run.batch > left:
        kept_out = f"{run.validation} kept out for validation of {len(data.train_y)}"
        raise PathError(f"{run.dataset} has {left} points to train on ({kept_out}), batches have {run.batch}")


def prepare_data(data: Dataset, run: Run, device: torch.device) -> TrainingData:
    """Splits off the validation points, or takes the test set, and subtracts the training mean."""
    check_enough_points(data, run)
    return _prepare_data(data, run.validation, run.seed.split if run.validation else 0, run.centre, device)


@functools.lru_cache(maxsize=2)  # shared by runs
def _prepare_data(
    data: Dataset, validation: int, seed: int, centre: bool, device: torch.device
) -> TrainingData:
    train_x, train_y = data.scaled(data.train_x), data.train_y
    evaluated_x, evaluated_y = data.scaled(data.test_x), data.test_y
    if validation:
        order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(seed))
        kept, out = order[validation:], order[:validation]
        evaluated_x, evaluated_y = train_x[out], train_y[out]
        train_x, train_y = train_x[kept], train_y[kept]
    if centre:
        mean = train_x.double().mean(0).float()
        train_x, evaluated_x = train_x - mean, evaluated_x - mean
    tensors = (tensor.to(device) for tensor in (train_x, train_y, evaluated_x, evaluated_y))
    return TrainingData(data.classes, *tensors)


def make_network(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them, with any weights."""
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@functools.cache
def trace_network(*widths: int) -> PathGraph:
    """Traces a network once for all runs with the same one.

    Call it before runs are trained in threads: a trace changes settings of the whole process meanwhile, and
    with them how products are rounded.
    """
    return trace(make_network(*widths), torch.zeros(1, widths[0]))


def make_initial_network(run: Run, features: int, classes: int) -> tuple[nn.Sequential, PathGraph]:
    """Network with the paper's weights, N(0, 1/fan_in) and biases 0, rescaled if the run asks for it."""
    widths = features, *run.hidden, classes
    model, graph = make_network(*widths), trace_network(*widths)
    generator = torch.Generator().manual_seed(run.seed.init)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.zero_()
            else:
                parameter.normal_(0, 1 / math.sqrt(parameter.shape[1]), generator=generator)
    if run.init != "balanced":
        generator = torch.Generator().manual_seed(run.seed.rescaling)
        unbalance(model, graph, generator=generator, powers_of_two=run.init == "powers-of-two")
    return model, graph


def drop_units(x: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Zeroes each entry with this probability, and divides the others by the probability to keep them.

    torch's dropout would do, but it takes the generator that everything else uses.
    """
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - probability, generator=generator)
    return x * (mask * (1 / (1 - probability)))


class LossAndError(NamedTuple):
    """Cross-entropy and 0/1 error, means over points."""

    loss: float
    error: float


@torch.no_grad()
def _measure(outputs: Tensor, y: Tensor) -> LossAndError:
    outputs = outputs.double()
    loss = nn.functional.cross_entropy(outputs, y)
    error = outputs.argmax(1).ne(y).double().mean()
    return LossAndError(*torch.stack([loss, error]).tolist())


class Trainer:
    """A network, its optimizer and its random generators, on the device of the data."""

    def __init__(self, run: Run, data: TrainingData) -> None:
        self.run, self.data, self.device = run, data, data.train_x.device
        self.model, graph = make_initial_network(run, data.train_x.shape[1], data.classes)
        self.model.to(self.device)
        self.optimizer = find_method(run.method).make(self.model, graph, run.step_size, run.p)
        self.order_generator = torch.Generator().manual_seed(run.seed.order)
        self.dropout_generator = torch.Generator(self.device).manual_seed(run.seed.dropout)
        self.steps = len(data.train_y) // run.batch
        self.outputs = torch.zeros(self.steps * run.batch, data.classes, device=self.device)

    def train_epoch(self) -> LossAndError:
        """Trains on every point once. Each batch is measured before its step."""
        order = torch.randperm(len(self.data.train_y), generator=self.order_generator).to(self.device)
        points = order[: len(self.outputs)]
        places = torch.arange(len(points), device=self.device).split(self.run.batch)
        for batch in zip(points.split(self.run.batch), places, strict=True):
            if not self.step(*batch):
                return LossAndError(math.nan, math.nan)
        # Once for all batches: for each it would take a tenth of a step.
        return _measure(self.outputs, self.data.train_y[points])

    def step(self, points: Tensor, places: Tensor) -> bool:
        """Takes a step and keeps the outputs at these places; False if the loss is not finite."""
        for parameter in self.model.parameters():
            parameter.grad = None
        outputs = self._forward(self.data.train_x[points])
        loss = nn.functional.cross_entropy(outputs, self.data.train_y[points])
        # On a GPU, which works ahead, it is seen at the end of the epoch.
        if self.device.type == "cpu" and not math.isfinite(float(loss.detach())):
            return False
        loss.backward()
        self.outputs.index_copy_(0, places, outputs.detach())
        self.optimizer.step()
        return True

    def _forward(self, x: Tensor) -> Tensor:
        for layer in self.model:
            if isinstance(layer, nn.Linear) and x.is_cuda:
                # The layer leaves its bias to cuBLAS, which for a batch of a hundred then takes a product
                # that is nearly half as fast: 165 us instead of 98 for 4000 by 4000 on an H200.
                x = x @ layer.weight.t() + layer.bias
            else:
                x = layer(x)
            if self.run.dropout > 0 and isinstance(layer, nn.ReLU):
                x = drop_units(x, self.run.dropout, self.dropout_generator)
        return x

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> LossAndError:
        return _measure(torch.cat([self.model(part) for part in x.split(EVALUATED_AT_ONCE)]), y)

    def state_dict(self) -> dict[str, Any]:
        generators = {"order": self.order_generator.get_state(), "drops": self.dropout_generator.get_state()}
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order_generator.set_state(state["order"].cpu())
        self.dropout_generator.set_state(state["drops"].cpu())


SECONDS = 1.5  # time for each method
LR = 1e-30  # so small that no weight changes: a network that diverges would be timed on NaNs
WARM_UP_STEPS = 8
ROUNDS = 3
"""Rounds in which the methods take turns, with new models: where one lies in memory can cost a third of its
speed."""


def measure_step_cost(study: Study, info: DataInfo, device: torch.device) -> StepCost:
    """Times whole training steps; on a GPU they are captured in CUDA graphs."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = study.tf32
    widths = math.prod(info.shape), *study.hidden, info.classes
    x = torch.randn(study.batch, widths[0], device=device)
    y = torch.randint(info.classes, (study.batch,), device=device)
    times: dict[str, list[float]] = {"sgd": [], "path": []}
    threads = torch.get_num_threads()
    for _ in range(ROUNDS):
        for name, values in times.items():
            step = _make_step(name, make_network(*widths).to(device), x, y)
            timer = Timer("step()", globals={"step": step}, num_threads=threads)
            values.append(1e6 * timer.blocked_autorange(min_run_time=SECONDS / ROUNDS).median)
    medians = statistics.median(times["sgd"]), statistics.median(times["path"])
    machine = device_name(device) + (f", threads: {threads}" if device.type == "cpu" else "")
    return StepCost("-".join(map(str, widths)), machine, *medians)


def _make_step(name: str, model: nn.Sequential, x: Tensor, y: Tensor) -> Callable[[], object]:
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), LR, fused=True) if name == "sgd" else PathSGD(model, x[:1], lr=LR)
    )

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    if not x.is_cuda:
        step()
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    graph.optimizer = optimizer  # type: ignore[attr-defined]  # a graph does not keep what it works on
    return graph.replay
