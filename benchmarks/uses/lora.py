"""LoRA: does a pair learn alike however its factors are scaled? ``python -m benchmarks.uses.lora``

A pair adds alpha / r * B A to a frozen matrix. Row k of A times c and column k of B divided by c change
nothing, so where B = 0, as at the start, every scale of A is the same network. From such starts the Llama of
``networks.py`` learns C++. Runs are kept in ``results/uses/lora.json``; only those that are missing are made.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pathsgd
from benchmarks.league.tasks import Text
from benchmarks.uses.networks import NETWORKS
from benchmarks.uses.rows import FIGURES, RESULTS, Row, average, print_table, read_rows, write_rows

STEPS, ALPHA = 60, 16
TARGETS = ["q_proj", "v_proj"]  # peft's default for a Llama
STARTS = ("B = 0", "continued")
SCALES = (1e-3, 1.0, 1e3)
RANK, RANKS = 8, (2, 8, 64)
SEEDS = (0, 1, 2)


def read_headers() -> Text:
    """The C++ headers that torch is installed with. They differ between versions of torch."""
    folder = Path(torch.__file__).parent / "include" / "c10"
    files = [path.read_bytes() for path in sorted(folder.rglob("*.h"))]
    parts = {
        "train": b"".join(text for k, text in enumerate(files) if k % 5 > 1),
        "valid": b"".join(files[::5]),
        "test": b"".join(files[1::5]),
    }
    tensors = {name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in parts.items()}
    digest = hashlib.sha256(b"".join(files)).hexdigest()[:12]
    return Text(tensors, STEPS, batch=4, context=128, pieces=32, data_hash=digest)


def add_pairs(base: nn.Module, rank: int, seed: int) -> Any:
    import peft  # takes seconds

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=TARGETS)
    return peft.get_peft_model(copy.deepcopy(base), config)


@torch.no_grad()
def rescale_pairs(model: nn.Module, scale: float) -> None:
    """Multiplies A by ``scale`` and divides B by it. The function stays."""
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            weight.mul_(scale)
        elif "lora_B" in name:
            weight.div_(scale)


# Methods


def make_adamw(model: nn.Module, graph: pathsgd.PathGraph, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.0)


def make_lora_plus(model: Any, graph: pathsgd.PathGraph, lr: float) -> torch.optim.Optimizer:
    """LoRA+ (arXiv 2402.12354): B has 16 times the rate of A."""
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(model, torch.optim.AdamW, lr=lr, loraplus_lr_ratio=16)


def make_balanced_adamw(model: nn.Module, graph: pathsgd.PathGraph, lr: float) -> torch.optim.Optimizer:
    balance_pairs(model, graph)
    return make_adamw(model, graph, lr)


def balance_pairs(model: nn.Module, graph: pathsgd.PathGraph) -> None:
    """Without the base, which pairs that are saved alone have to fit."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    pathsgd.balance(model, graph, fixed=frozen)


def make_balanced_muon(model: nn.Module, graph: pathsgd.PathGraph, lr: float) -> torch.optim.Optimizer:
    return pathsgd.BalancedMuon(model, graph=graph, lr=lr)


@dataclass(frozen=True)
class Method:
    """``rate`` is the usual one; None if it is the best one from the usual start."""

    label: str
    make: Callable[[Any, pathsgd.PathGraph, float], torch.optim.Optimizer]
    rate: float | None = None


METHODS = {
    "adamw": Method("AdamW", make_adamw),
    "lora+": Method("LoRA+", make_lora_plus),
    "balance": Method("balanced, AdamW", make_balanced_adamw),
    "muon": Method("BalancedMuon", make_balanced_muon, 0.09),
    "muon, low": Method("BalancedMuon, a tenth", make_balanced_muon, 0.009),
}
SEARCHED = [name for name in METHODS if name != "muon, low"]


def train(model: Any, optimizer: torch.optim.Optimizer, task: Text, seed: int) -> None:
    """5% warm-up, then linearly to zero."""
    warm_up = max(1, task.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / warm_up, (task.steps - t) / (task.steps - warm_up))
    )
    for batch in task.batches(model, torch.Generator().manual_seed(seed), task.steps):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        schedule.step()


class Study:
    """Runs, of which those that are among ``rows`` are not made again.

    Args:
        load: the trained network.
        task: what it is to learn.
        rows: of runs that were made; others are appended.
        save: called after each run.
    """

    def __init__(
        self, load: Callable[[], nn.Module], task: Text, rows: list[Row], save: Callable[[], None]
    ) -> None:
        self.load, self.task, self.rows, self.save = functools.cache(load), task, rows, save
        self._graphs: dict[int, pathsgd.PathGraph] = {}
        self._continued: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def run(self, method: str, start: str, rank: int, scale: float, seed: int, rate: float) -> Row:
        """A row of the losses on both held-out parts."""
        key = {
            "method": method, "start": start, "rank": rank, "scale": scale, "seed": seed, "rate": rate,
            "data": self.task.data_hash,
        }  # fmt: skip
        for row in self.rows:
            if key.items() <= row.items():
                return row
        model = self.make_start(start, rank, seed)
        rescale_pairs(model, scale)
        optimizer = METHODS[method].make(model, self._trace(model, rank), rate)
        train(model, optimizer, self.task, seed + 100 * STARTS.index(start))
        row = {**key, **{part: self._measure(model, part) for part in ("valid", "test")}}
        self.rows.append(row)
        self.save()
        return row

    def _measure(self, model: nn.Module, part: Any) -> float:
        return round(self.task.evaluate(model, part)["loss"], 5)

    def make_start(self, start: str, rank: int, seed: int) -> Any:
        """Pairs as peft makes them; or as AdamW has trained these, at its usual rate."""
        model = add_pairs(self.load(), rank, seed)
        if start == "continued":
            if (rank, seed) not in self._continued:
                train(model, make_adamw(model, self._trace(model, rank), self.rate("adamw")), self.task, seed)
                self._continued[rank, seed] = copy.deepcopy(model.state_dict())
            model.load_state_dict(self._continued[rank, seed])
        return model

    def _trace(self, model: nn.Module, rank: int) -> pathsgd.PathGraph:
        if rank not in self._graphs:
            self._graphs[rank] = pathsgd.trace(model, self.task.example)
        return self._graphs[rank]

    def search(self, method: str, start: str, rank: int, scale: float) -> Row:
        """The run of the best rate on the part "valid": by decades from 1e-3 until both neighbours are worse,
        then half a decade to both sides."""

        def run(half_decades: int) -> Row:
            return self.run(method, start, rank, scale, SEEDS[0], float(f"{10 ** (half_decades / 2):.1e}"))

        best = -6
        for step in (2, 2, 2, 2, 2, 2, 1):
            best = min((best, best - step, best + step), key=lambda k: float(run(k)["valid"]))
        return run(best)

    def rate(self, method: str) -> float:
        """The usual one."""
        return METHODS[method].rate or float(self.search(method, "B = 0", RANK, 1.0)["rate"])

    def at_usual_rate(self, method: str, start: str, rank: int, scale: float) -> float:
        """The mean test loss; of other ranks than the usual one over one seed."""
        seeds = SEEDS if rank == RANK else SEEDS[:1]
        rate = self.rate(method)
        return average([self.run(method, start, rank, scale, seed, rate) for seed in seeds], "test")


# Table and figure


def print_tables(study: Study) -> None:
    cells = [(start, scale) for start in STARTS for scale in SCALES]
    at = [f"{start}, A x {scale:g}" for start, scale in cells]
    print(f"Test loss at the usual rate, rank {RANK}, mean of {len(SEEDS)} seeds:\n")
    lines = []
    for name, method in METHODS.items():
        losses = [study.at_usual_rate(name, start, RANK, scale) for start, scale in cells]
        lines.append([method.label, f"{study.rate(name):g}", *(f"{loss:.3f}" for loss in losses)])
    print_table(["", "rate", *at], lines)
    print("\nThe best rate (test loss), one seed:\n")
    lines = []
    for name in SEARCHED:
        found = [study.search(name, start, RANK, scale) for start, scale in cells]
        found += [study.search(name, STARTS[0], rank, 1.0) for rank in RANKS if rank != RANK]
        lines.append([METHODS[name].label, *(f"{row['rate']:g} ({row['test']:.3f})" for row in found)])
    print_table(["", *at, *(f"rank {rank}" for rank in RANKS if rank != RANK)], lines)
    print("\nOther ranks at the usual rate, one seed:\n")
    cells_of_ranks = [(rank, scale) for rank in RANKS if rank != RANK for scale in SCALES]
    lines = [
        [method.label, *(f"{study.at_usual_rate(name, STARTS[0], *cell):.3f}" for cell in cells_of_ranks)]
        for name, method in METHODS.items()
    ]
    print_table(["", *(f"rank {rank}, A x {scale:g}" for rank, scale in cells_of_ranks)], lines)


STYLES = {
    "adamw": ("tab:red", "-", "o"), "lora+": ("tab:orange", "--", "s"), "balance": ("tab:blue", "-", "^"),
    "muon": ("black", "-", "D"), "muon, low": ("0.5", ":", "v"),
}  # fmt: skip


def draw(study: Study, path: Path) -> None:
    """Test loss at the usual rate, by the scale of A."""
    from matplotlib.figure import Figure

    figure = Figure((9, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots(1, len(STARTS), sharey=True)
    for ax, start in zip(axes, STARTS, strict=True):
        for name, (colour, line, marker) in STYLES.items():
            losses = [study.at_usual_rate(name, start, RANK, scale) for scale in SCALES]
            ax.plot(SCALES, losses, color=colour, linestyle=line, marker=marker, label=METHODS[name].label)
        ax.set(xscale="log", xticks=SCALES, xlabel="A times, B divided by", title=start)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("test loss, nats a byte")
    axes[0].legend(frameon=False, loc="upper left")
    figure.savefig(path)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = read_rows("lora") if (RESULTS / "lora.json").exists() else []
    torch.set_num_threads(1)
    study = Study(NETWORKS["llama"].load, read_headers(), rows, lambda: write_rows("lora", rows))
    print_tables(study)
    draw(study, FIGURES / "uses-lora.png")


if __name__ == "__main__":
    main()
