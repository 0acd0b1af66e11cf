"""Folds the batch norms of trained networks into their convolutions, as converters do, and fine-tunes them.

``python -m benchmarks.uses.folding vgg resnet-18 --data FOLDER`` measures these networks anew; without a name
the table and the figure are made of the records. 15 to 25 minutes on a CPU core.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import pathsgd
from benchmarks.league.baselines import Muon
from benchmarks.league.tasks import Batch, Images
from benchmarks.uses.networks import NETWORKS, fold
from benchmarks.uses.rows import FIGURES, Row, average, measure_by_network, print_table

SEEDS = {"vgg": 3, "resnet-18": 2}
STARTS = ("batch norms kept", "folded", "folded, then `balance`")
USUAL, LADDER = 1e-3, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Rates of AdamW and Muon. BalancedMuon has the one rate that its documentation gives for fine-tuning."""
FINE_TUNING_RATE = 0.009
STEPS, BATCH = 120, 64
MUON_AT = 6e-2  # in the figure, beside the rates


def shift(task: Images) -> Images:
    """Turns images into noisy negatives with red and blue exchanged, and takes fewer of those held out."""
    generator = torch.Generator().manual_seed(0)

    def negative(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator).mul_(0.5).sub_(x.flip(1))

    held_out = {
        part: (negative(x[:count]), y[:count])
        for (part, (x, y)), count in zip(task.held_out.items(), (2000, 5000), strict=True)
    }
    return replace(task, x=negative(task.x), held_out=held_out, steps=STEPS, batch=BATCH)


def make_start(network: str, start: str, x: Tensor) -> nn.Module:
    """A trained network as it is, or folded, or balanced as well."""
    model = NETWORKS[network].load()
    if start != STARTS[0]:
        model = fold(model)
    if start == STARTS[2]:
        pathsgd.balance(model, x)
    return model.to(memory_format=torch.channels_last)


def make_optimizer(
    model: nn.Module, rate: float | None, x: Tensor, method: str = "AdamW"
) -> torch.optim.Optimizer:
    """AdamW or Muon at this rate, or BalancedMuon at its own."""
    if rate is None:
        return pathsgd.BalancedMuon(model, x, lr=FINE_TUNING_RATE)
    if method == "Muon":
        return Muon(model, rate, rest_lr=rate)
    return torch.optim.AdamW(model.parameters(), rate)


def fine_tune(
    model: nn.Module, optimizer: torch.optim.Optimizer, task: Images, seed: int
) -> Iterator[tuple[int, Batch]]:
    """Takes the steps of a task one by one, with 5% warm-up and a cosine; yields what each step had."""
    warm_up = task.steps / 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * t / task.steps))
    )
    generator = torch.Generator().manual_seed(seed)
    for step, batch in enumerate(task.batches(model, generator, task.steps)):
        model.train()
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        schedule.step()
        yield step, batch


def evaluate(model: nn.Module, task: Images) -> Row:
    """Numbers on the test part, and the error that rates are chosen by."""
    model.eval()
    return {**task.evaluate(model, "test"), "valid": task.evaluate(model, "valid")["error"]}


def measure_scale(network: str, x: Tensor) -> Row:
    """How far the channels of the folded network are from balanced, and how many are dead."""
    folded = make_start(network, STARTS[1], x)
    found = pathsgd.imbalance(folded, x)
    spreads = [layer.imbalance for layer in found.layers if layer.imbalance]
    kernels = [module.weight for module in folded.modules() if isinstance(module, nn.Conv2d)]
    sizes = [kernel.detach().flatten(1).norm(dim=1) for kernel in kernels]
    return {
        "network": network, "ratio": found.ratio, "smallest": min(s.smallest for s in spreads),
        "largest": max(s.largest for s in spreads), "channels": sum(map(len, sizes)),
        "dead": sum(int((size < 1e-3 * size.mean()).sum()) for size in sizes),
    }  # fmt: skip


def measure_run(
    network: str, start: str, rate: float | None, seed: int, task: Images, method: str = "AdamW"
) -> Row:
    model = make_start(network, start, task.example)
    for _ in fine_tune(model, make_optimizer(model, rate, task.example, method), task, seed):
        pass
    row = {"network": network, "start": start, "rate": rate, "seed": seed, **evaluate(model, task)}
    row |= {"method": method} if method != "AdamW" else {}
    print(row, flush=True)
    return row


def search(network: str, start: str, task: Images, method: str = "AdamW") -> Iterator[Row]:
    """Runs of the first seed at the usual rate, its neighbours, and on until those of the best are worse."""
    found: dict[int, float] = {}
    middle = LADDER.index(USUAL)
    pending = [middle - 1, middle, middle + 1]
    while pending:
        for k in pending:
            row = measure_run(network, start, LADDER[k], 0, task, method)
            found[k] = row["valid"]
            yield row
        best = min(found, key=found.__getitem__)
        pending = [k for k in (best - 1, best + 1) if k not in found and 0 <= k < len(LADDER)]


def measure(network: str, task: Images) -> Iterator[Row]:
    x = task.example
    yield measure_scale(network, x)
    for start in STARTS[:2]:
        yield {"network": network, "start": start, **evaluate(make_start(network, start, x), task)}
    for start in STARTS:
        searched = list(search(network, start, task))
        yield from searched
        for seed in range(SEEDS[network]):
            if seed:
                for rate in sorted({USUAL, best_rate(searched, network, start)}):
                    yield measure_run(network, start, rate, seed, task)
            if start != STARTS[2]:  # BalancedMuon balances by itself
                yield measure_run(network, start, None, seed, task)
    yield from measure_muon(network, task)


def measure_muon(network: str, task: Images) -> Iterator[Row]:
    """Muon from the folded network, where BalancedMuon is ahead of AdamW."""
    searched = list(search(network, STARTS[1], task, "Muon"))
    yield from searched
    for seed in range(1, SEEDS[network]):
        rate = best_rate(searched, network, STARTS[1], "Muon")
        yield measure_run(network, STARTS[1], rate, seed, task, "Muon")


def runs_of(
    rows: Sequence[Row], network: str, start: str, rate: float | None, method: str = "AdamW"
) -> list[Row]:
    wanted = {"network": network, "start": start, "rate": rate, "method": method}
    known = [{"method": "AdamW", **row} for row in rows if "seed" in row]
    return [row for row in known if all(row[key] == wanted[key] for key in wanted)]


def searched_rates(rows: Sequence[Row], network: str, start: str, method: str = "AdamW") -> dict[float, Row]:
    """Runs of the first seed by their rates."""
    found = {rate: runs_of(rows, network, start, rate, method) for rate in LADDER}
    return {rate: some[0] for rate, some in found.items() if some}


def best_rate(rows: Sequence[Row], network: str, start: str, method: str = "AdamW") -> float:
    """By the validation error of the first seed."""
    found = searched_rates(rows, network, start, method)
    return min(found, key=lambda rate: found[rate]["valid"])


def describe(rows: Sequence[Row]) -> str:
    """Mean test error and its standard deviation over seeds."""
    if len(rows) < 2:
        return ""
    return f"{average(rows, 'error'):.1f} ± {statistics.stdev(row['error'] for row in rows):.1f}"


def tabulate(rows: Sequence[Row]) -> None:
    header = ["network", "start", f"AdamW, {USUAL:g}", "AdamW, best rate", "Muon, best rate", "BalancedMuon"]
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        for start in STARTS:
            best = best_rate(rows, network, start)
            usual, tuned, ours = (describe(runs_of(rows, network, start, r)) for r in (USUAL, best, None))
            muon = ""
            if searched_rates(rows, network, start, "Muon"):
                rate = best_rate(rows, network, start, "Muon")
                muon = f"{describe(runs_of(rows, network, start, rate, 'Muon'))} at {rate:g}"
            lines.append([NETWORKS[network].label, start, usual, f"{tuned} at {best:g}", muon, ours])
    print_table(header, lines)
    for row in rows:
        if "seed" not in row:
            print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})


def draw(rows: Sequence[Row]) -> None:
    """Test error of the first seed over the rate, a panel a network; BalancedMuon's at the side."""
    from matplotlib.figure import Figure

    networks = list(dict.fromkeys(row["network"] for row in rows))
    figure = Figure(figsize=(9, 4.5), dpi=100, layout="constrained")
    styles = dict(zip(STARTS, (("0.6", "o-"), ("0.0", "s--"), ("C1", "^-")), strict=True))
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
        for start, (colour, style) in styles.items():
            found = searched_rates(rows, network, start)
            errors = [row["error"] for row in found.values()]
            axes.plot(list(found), errors, style, color=colour, label=start.replace("`", ""))
            for row in runs_of(rows, network, start, None)[:1]:
                axes.plot(MUON_AT, row["error"], style[0], color=colour)
        found = searched_rates(rows, network, STARTS[1], "Muon")
        axes.plot(
            list(found), [row["error"] for row in found.values()], "D:", color="C0", label="folded, Muon"
        )
        axes.set_xscale("log")
        axes.set_xticks([*LADDER, MUON_AT], [*(f"{rate:g}" for rate in LADDER), "Balanced-\nMuon"])
        axes.minorticks_off()
        axes.set_title(NETWORKS[network].label)
        axes.set_xlabel("rate", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("test error after fine-tuning, %")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=4, loc="outside lower center")
    figure.savefig(FIGURES / "uses-folding.png")


if __name__ == "__main__":
    measure_by_network(
        "folding", __doc__, lambda network, task: measure(network, shift(task)), tabulate, draw
    )
