"""Averages the weights of trained networks: soups, averages along a run, the line between two networks.

``python -m benchmarks.uses.averages vgg resnet-18 --data FOLDER`` measures these networks anew; without a
name the table and the figure are made of the records. About 10 minutes on a CPU core.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Iterator, Sequence
from itertools import count, islice

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pathsgd
from benchmarks.league.tasks import Images
from benchmarks.uses.folding import STARTS, fine_tune, make_optimizer, make_start, shift
from benchmarks.uses.networks import NETWORKS
from benchmarks.uses.rows import FIGURES, Row, measure_by_network, print_table

SOUPS = {"vgg": 3, "resnet-18": 2}
RATES = (3e-4, 5e-4, 1e-3)
"""Of AdamW, one for each member of a soup. BalancedMuon makes one more."""
EVERY, DECAY = 10, 0.8
"""Of averages along a run: steps between checkpoints, and what each leaves of the average before it."""
CASES = {
    "soup, nobody rescaled": "as they are",
    "soup, one member rescaled at random": "rescaled",
    "soup, one member with equalised ranges": "equalised",
    "soup, one member trained by BalancedMuon": "BalancedMuon",
    "EMA, AdamW": "run",
    "EMA, AdamW, then BalancedMuon": "handover",
}
POINTS = 11


def average_weights(members: Sequence[nn.Module], decay: float | None = None) -> nn.Module:
    """The uniform average of networks, or the exponential moving average of them in this order."""
    ema = get_ema_multi_avg_fn(decay) if decay else None
    averaged = AveragedModel(members[0], multi_avg_fn=ema)
    for member in members:
        averaged.update_parameters(member)
    return averaged.module.eval()


def balanced(members: Sequence[nn.Module], x: Tensor) -> list[nn.Module]:
    """Balanced copies."""
    copies = copy.deepcopy(list(members))
    graph = pathsgd.trace(copies[0], x)
    for member in copies:
        pathsgd.balance(member, graph)
    return copies


def rescaled(member: nn.Module, x: Tensor, seed: int) -> nn.Module:
    """The same function: a quarter of the units times random powers of two, most of them from 2^-2 to 2^2."""
    member = copy.deepcopy(member)
    generator = torch.Generator().manual_seed(seed)
    pathsgd.unbalance(member, x, factor=1.0, powers_of_two=True, generator=generator)
    return member


def equalised(member: nn.Module, x: Tensor) -> nn.Module:
    """The same function, with channels of equal range as tools make it before quantisation."""
    member = copy.deepcopy(member)
    pathsgd.balance(member, x, p=8, q=8)
    return member


@torch.no_grad()
def interpolate(one: nn.Module, other: nn.Module, t: float) -> nn.Module:
    """The network at ``t`` on the line from one to the other."""
    between = copy.deepcopy(one)
    for weight, end in zip(between.parameters(), other.parameters(), strict=True):
        weight.lerp_(end, t)
    return between


def run(model: nn.Module, task: Images, rate: float | None, seed: int) -> Iterator[nn.Module]:
    """Checkpoints of a fine-tuning, the last of them at its end."""
    optimizer = make_optimizer(model, rate, task.example)
    for step, _ in fine_tune(model, optimizer, task, seed):
        if (step + 1) % EVERY == 0:
            yield copy.deepcopy(model).eval()


def train_members(network: str, task: Images, seed: int) -> dict[str, list[nn.Module]]:
    """What is averaged in each case."""
    x = task.example
    folded = make_start(network, STARTS[1], x)
    seeds = count(10 * seed)
    runs = [list(run(copy.deepcopy(folded), task, rate, next(seeds))) for rate in RATES]
    (*_, muon) = run(copy.deepcopy(folded), task, None, next(seeds))
    after = islice(run(copy.deepcopy(runs[1][-1]), task, None, next(seeds)), 3)
    one, two, three = (checkpoints[-1] for checkpoints in runs)
    return {
        "as they are": [one, two, three],
        "rescaled": [one, two, rescaled(three, x, seed)],
        "equalised": [one, two, equalised(three, x)],
        "BalancedMuon": [one, two, muon],
        "run": runs[1],
        "handover": [*runs[1], *after],
    }


def measure(network: str, task: Images) -> Iterator[Row]:
    x = task.example
    for seed in range(SOUPS[network]):
        cases = train_members(network, task, seed)
        error = functools.cache(lambda member: task.evaluate(member, "test")["error"])
        for case, members in cases.items():
            decay = DECAY if case in ("run", "handover") else None
            errors = [error(member) for member in members[-1 if decay else 0 :]]
            row = {"network": network, "seed": seed, "case": case, "members": errors}
            for how, some in (("plain", members), ("balanced", balanced(members, x))):
                row[how] = task.evaluate(average_weights(some, decay), "test")
            print(row, flush=True)
            yield row
        if seed == 0:
            one, _, three = cases["as they are"]
            lines = {
                "as they are": (one, three),
                "one rescaled at random": (one, cases["rescaled"][-1]),
                "one with equalised ranges": (one, cases["equalised"][-1]),
                "both balanced": balanced((one, three), x),
            }
            for label, (start, end) in lines.items():
                ts = torch.linspace(0, 1, POINTS).tolist()
                losses = [task.evaluate(interpolate(start, end, t), "valid")["loss"] for t in ts]
                yield {"network": network, "line": label, "losses": losses}


def describe(errors: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(errors):.1f}" if len(errors) > 1 else ""
    return f"{statistics.mean(errors):.1f}{spread}"


def tabulate(rows: Sequence[Row]) -> None:
    """Test errors."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    header = ["average of"]
    for network in networks:
        label = NETWORKS[network].label
        header += [f"{label}: members", "average", "average after `balance`"]
    lines = []
    for label, case in CASES.items():
        cells = [label]
        for network in networks:
            some = [row for row in rows if row["network"] == network and row.get("case") == case]
            members = [error for row in some for error in row["members"]]
            cells += [f"{statistics.mean(members):.1f}"]
            cells += [describe([row[how]["error"] for row in some]) for how in ("plain", "balanced")]
        lines.append(cells)
    print_table(header, lines)


def draw(rows: Sequence[Row]) -> None:
    """The loss along the line between two members, a panel a network."""
    from matplotlib.figure import Figure

    lines = [row for row in rows if "line" in row]
    networks = list(dict.fromkeys(row["network"] for row in lines))
    figure = Figure(figsize=(9, 4.5), dpi=100, layout="constrained")
    styles = {
        "as they are": ("0.6", "-", 4), "one rescaled at random": ("C3", "--", 1.5),
        "one with equalised ranges": ("C0", "-.", 1.5), "both balanced": ("0.0", "-", 1.5),
    }  # fmt: skip
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
        for row in lines:
            if row["network"] == network:
                colour, style, width = styles[row["line"]]
                ts = [k / (POINTS - 1) for k in range(POINTS)]
                axes.plot(ts, row["losses"], style, color=colour, linewidth=width, label=row["line"])
        axes.set_title(NETWORKS[network].label)
        axes.set_xticks([0, 0.5, 1], ["one network", "average", "the other"])
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("loss on held-out images, nats")
    figure.axes[0].legend(frameon=False)
    figure.savefig(FIGURES / "uses-averages.png")


if __name__ == "__main__":
    measure_by_network(
        "averages", __doc__, lambda network, task: measure(network, shift(task)), tabulate, draw
    )
