"""Random networks that know which rescalings leave them as they are, and whether the library offers these.

    python -m tests.support.random_networks [--first 0] [--count 500]

prints, by kind of unit, how many rescalings were planted and how many the library offers, then every failure
with its seed, and the slowest traces.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import pathsgd

from . import random_blocks, random_images, random_sequences, random_weights
from .random_blocks import Block, Gated, Norm, Parts, Residual, SquaredRelu
from .random_operators import Odd
from .scale_ledger import Ledger, Rescaling

WIDTH, TIME, TOKENS, SIZE = 4, 4, 7, 8


@dataclass
class PlantedNetwork:
    model: nn.Module
    example_input: Tensor
    planted: list[Rescaling]


class Network(nn.Module):
    """An entry, random blocks, and a head; of tokens, the head may be the table of the entry."""

    def __init__(self, pick):
        super().__init__()
        self.kind = pick.choice(["vectors", "sequences", "sequences", "tokens", "images"])
        self.tied = self.kind == "tokens" and pick.random() < 0.5
        self.blocks = nn.ModuleList()
        self.exit = "none"
        if self.kind == "images":
            self.enter = nn.Conv2d(3, WIDTH, 3, padding=1)
            self.exit = pick.choice(["flatten", "mean", "max"])
        elif self.kind == "tokens":
            self.enter = nn.Embedding(TOKENS, WIDTH)
        else:
            self.enter = nn.Linear(3, WIDTH)
        if self.kind == "sequences":
            self.exit = pick.choice(["none", "last", "mean over time", "flatten"])
        for _ in range(pick.randint(1, 3)):
            self.add(pick)
        x = self.carry(self.example())
        if self.exit == "flatten" and x.shape[1] > 64:
            self.exit, x = "mean", x[:, :WIDTH]
        if self.exit != "none" and x.shape[1] <= 16 and pick.random() < 0.6:
            self.after = pick.choice([Gated, SquaredRelu, Parts, Norm])(pick, x.shape[-1])
        else:
            self.after = None
        features = x.shape[-1]
        self.head = None if self.tied else nn.Linear(features, 3, bias=pick.random() < 0.8)

    def example(self, batch=1):
        if self.kind == "tokens":
            return torch.arange(batch * TIME).reshape(batch, TIME) * 3 % TOKENS
        shape = {"vectors": (3,), "sequences": (TIME, 3), "images": (3, SIZE, SIZE)}[self.kind]
        return torch.randn(batch, *shape, dtype=torch.float64)

    def add(self, pick):
        if self.kind == "images":
            if min(self.double().walk(self.example()).shape[2:]) >= 4:
                self.blocks.append(pick.choice(random_images.BLOCKS)(pick, WIDTH))
            return
        if self.kind == "vectors" or pick.random() < 0.4:
            make = pick.choice([*random_blocks.BLOCKS, *random_weights.BLOCKS, Odd, Odd, Odd, Odd])
        else:
            make = pick.choice(random_sequences.BLOCKS)
        extra = [TIME] if make is random_sequences.Mixing else []
        block: Block = make(pick, WIDTH, *extra)
        self.blocks.append(Residual(pick, WIDTH, block) if pick.random() < 0.5 else block)

    def walk(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x

    @torch.no_grad()
    def carry(self, x):
        return self.double().leave(self.walk(x))

    def leave(self, x):
        match self.exit:
            case "flatten":
                return x.flatten(1)
            case "mean":
                return x.mean((2, 3))
            case "max":
                return x.amax((-1, -2))
            case "last":
                return x[:, -1]
            case "mean over time":
                return x.mean(1)
        return x

    def forward(self, x):
        x = self.leave(self.walk(x))
        if self.after is not None:
            x = self.after(x)
        return x @ self.enter.weight.T if self.tied else self.head(x)

    def find_rescalings(self) -> list[Rescaling]:
        ledger = Ledger()
        if self.kind == "tokens":
            stream = ledger.fresh("embedding", WIDTH)
            ledger.parameter(self.enter.weight, stream)
            ids = stream.expand(1, TIME, WIDTH)
        else:
            fixed = torch.zeros(self.example().shape, dtype=torch.long)
            write = ledger.conv if self.kind == "images" else ledger.linear
            ids = write(self.enter, fixed, "entry")
        for block in self.blocks:
            ids = block.scales(ledger, ids)
        if self.exit == "last" or self.exit == "flatten":
            ids = self.leave(ids)
        elif self.exit != "none":
            dims = (2, 3) if self.kind == "images" else (1,)
            ids = ledger.tie_along(ids, *dims).flatten(1)
        if self.after is not None:
            ids = self.after.scales(ledger, ids)
        if self.tied:
            ledger.parameter(self.enter.weight, torch.tensor(0), ledger.tie_along(ids, 0, 1).reshape(-1))
        else:
            ledger.fix(ledger.linear(self.head, ids, "output"))
        return ledger.solve(self)


def make_network(seed: int) -> PlantedNetwork:
    """A network in fp64 and in eval mode, every number of it generic."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        pick = random.Random(seed)
        while True:
            model = Network(pick).double().eval()
            draw_weights(model)
            example = model.example()
            if model(example).isfinite().all():  # attention that divides by a sum may divide zero by zero
                return PlantedNetwork(model, example, find_planted(model))


def draw_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        fan = parameter[0].numel() if parameter.dim() > 1 else 1
        size = torch.rand_like(parameter) + 0.3
        parameter.copy_(size * torch.randn_like(parameter).sign() / fan**0.5)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand_like(buffer) + 0.3)


def find_planted(model: Network) -> list[Rescaling]:
    """Where nothing is divided, as before F.normalize, a scale has no influence: that is no rescaling."""
    return [
        rescaling
        for rescaling in model.find_rescalings()
        if len({power > 0 for *_, power in rescaling.entries}) == 2
    ]


def difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()  # zeros, if all units are dead


@torch.no_grad()
def check_planted(network: PlantedNetwork) -> list[Rescaling]:
    """The planted rescalings that do change the function: mistakes of the blocks."""
    x = inputs(network)
    before = network.model(x)
    wrong = []
    for rescaling in network.planted:
        model = copy.deepcopy(network.model)
        rescaling.apply(model, 3.0)
        if not difference(model(x), before) <= 1e-10:
            wrong.append(rescaling)
    return wrong


def inputs(network: PlantedNetwork) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return network.model.example(5)


def find_missing(model: nn.Module, graph: pathsgd.PathGraph, planted: list[Rescaling]) -> list[Rescaling]:
    """The planted rescalings that the library does not offer."""
    missing = []
    generator = random.Random(0)
    for rescaling in planted:
        rescaled = copy.deepcopy(model)
        rescaling.apply(rescaled, generator.choice([0.3, 0.7, 1.9, 3.1]))
        if not pathsgd.rescaling_equivalent(model, rescaled, graph):
            missing.append(rescaling)
    return missing


@dataclass
class Report:
    """What one network has shown; ``failures`` are in words."""

    seconds: float = 0.0
    planted: list[Rescaling] = field(default_factory=list)
    missing: list[Rescaling] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def examine(seed: int) -> Report:
    network, report = make_network(seed), Report()
    report.planted = network.planted
    if wrong := check_planted(network):
        report.failures.append(f"the generator is wrong: {Counter(r.kind for r in wrong)}")
    start = time.perf_counter()
    try:
        graph = pathsgd.trace(network.model, network.example_input)
        report.seconds = time.perf_counter() - start
        report.missing = find_missing(network.model, graph, network.planted)
        report.failures += check_function(network, graph, report.missing)
    except Exception as error:
        last = "".join(traceback.format_tb(error.__traceback__)[-1:]).strip()
        report.failures.append(f"{type(error).__name__}: {str(error)[:400]}\n{last}")
    return report


@torch.no_grad()
def check_function(network: PlantedNetwork, graph: pathsgd.PathGraph, missing: list[Rescaling]) -> list[str]:
    """unbalance and balance keep the function, and every rescaled copy is balanced to the same weights."""
    x, failures = inputs(network), []
    model = network.model
    before = model(x)
    balanced = copy.deepcopy(model)
    pathsgd.balance(balanced, graph)
    if not (error := difference(balanced(x), before)) <= 1e-10:
        failures.append(f"balance changes the function by {error:.1e}")
    unbalanced = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    try:
        pathsgd.unbalance(unbalanced, graph, units=100, factor=1.5, sigma=0.3, generator=generator)
    except pathsgd.RescaleError as error:
        if "no unit that can be rescaled" not in str(error):
            failures.append(f"unbalance: {error}")
    rescaled = copy.deepcopy(model)
    drawn = random.Random(1)
    for rescaling in network.planted:
        if rescaling not in missing:
            rescaling.apply(rescaled, drawn.choice([0.3, 0.7, 1.9, 3.1]))
    for name, start in (("unbalance", unbalanced), ("planted rescalings", rescaled)):
        if not (error := difference(start(x), before)) <= 1e-10:
            failures.append(f"{name}: the function changes by {error:.1e}")
        pathsgd.balance(start, graph)
        if not (error := difference(start(x), before)) <= 1e-10:
            failures.append(f"balance after {name}: the function changes by {error:.1e}")
        far = {
            n: difference(a, b)
            for (n, a), b in zip(start.named_parameters(), balanced.parameters(), strict=True)
        }
        worst = max(far, key=far.get)
        if not far[worst] <= 1e-9:
            failures.append(f"balance after {name}: other weights, {worst} by {far[worst]:.1e}")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    planted: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    slow = []
    for seed in range(arguments.first, arguments.first + arguments.count):
        report = examine(seed)
        for counter, rescalings in ((planted, report.planted), (missing, report.missing)):
            counter.update(label for rescaling in rescalings for label in rescaling.kind.split("+"))
            counter["all"] += len(rescalings)
        for failure in report.failures:
            print(f"seed {seed}: {failure}", flush=True)
        slow.append((report.seconds, seed))
    print(f"{'planted':>8} {'found':>8}  kind")
    for label in sorted(planted, key=lambda label: (1 - missing[label] / planted[label], label)):
        print(f"{planted[label]:8} {planted[label] - missing[label]:8}  {label}")
    print("slowest traces:", ", ".join(f"seed {s} {t:.1f} s" for t, s in sorted(slow)[:-6:-1]))


if __name__ == "__main__":
    main()
