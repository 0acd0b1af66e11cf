"""Pruning: networks as trained and rescaled, by magnitude and by what rescaling does not change.

``python -m benchmarks.uses.pruning --data FOLDER`` measures and prints the table; ``--draw`` prints alone.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import pathsgd

from .networks import NETWORKS, first_images
from .rows import FIGURES, Row, average, print_table, read_rows, write_rows

Scores = dict[tuple[nn.Module, str], Tensor]
AMOUNTS = (0.5, 0.6, 0.7, 0.8, 0.9)
PRUNED = ("resnet-18", "vgg", "vit")
RETRAINED, STEPS, SEEDS = "vgg", 100, 3


def magnitude(model: nn.Module, x: Tensor) -> Scores:
    """What ``torch.nn.utils.prune.global_unstructured`` goes by."""
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    return {(layer, "weight"): layer.weight.detach().abs() for layer in layers}


def lamp(model: nn.Module, x: Tensor) -> Scores:
    """w^2 over the sum of all that are no smaller in its layer (arXiv 2010.07611)."""
    scores = {}
    for layer, weight in magnitude(model, x).items():
        squares, order = weight.flatten().square().sort(descending=True)
        scores[layer] = (
            torch.empty_like(squares).scatter(0, order, squares / squares.cumsum(0)).view_as(weight)
        )
    return scores


def balanced(find_scores: Callable[[nn.Module, Tensor], Scores]) -> Callable[[nn.Module, Tensor], Scores]:
    def find(model: nn.Module, x: Tensor) -> Scores:
        pathsgd.balance(model, x, unit_gains=False)
        return find_scores(model, x)

    return find


WAYS: dict[str, Callable[[nn.Module, Tensor], Scores]] = {
    "magnitude": magnitude,
    "LAMP": lamp,
    "path importance, p = 1": lambda model, x: pathsgd.path_importance(model, x, p=1),
    "path importance, p = 2": pathsgd.path_importance,
    "balance, then magnitude": balanced(magnitude),
    "balance, then LAMP": balanced(lamp),
}


def pruned(model: nn.Module, x: Tensor, way: str, amount: float) -> nn.Module:
    """A copy of the model without this share of the weights of all layers together."""
    model = copy.deepcopy(model)
    scores = WAYS[way](model, x)
    prune.global_unstructured(list(scores), prune.L1Unstructured, importance_scores=scores, amount=amount)
    return model


def rescaled(model: nn.Module, x: Tensor) -> nn.Module:
    """The paper's rescaling: a quarter of the units by about 10."""
    model = copy.deepcopy(model)
    pathsgd.unbalance(model, x, generator=torch.Generator().manual_seed(0))
    return model


def measure(name: str, data: Path) -> list[Row]:
    task = first_images(NETWORKS[name].task(data))
    trained = NETWORKS[name].load()
    rows = []
    for start, model in (("as trained", trained), ("rescaled", rescaled(trained, task.example))):
        for way in WAYS:
            row: Row = {"network": name, "start": start, "way": way}
            for amount in AMOUNTS:
                sparse = pruned(model, task.example, way, amount)
                row[f"{amount:g}"] = task.evaluate(sparse, "test")["error"]
            if name == RETRAINED:
                sparse = [pruned(model, task.example, way, 0.9) for _ in range(SEEDS)]
                errors = [retrain(each, task, seed) for seed, each in enumerate(sparse)]
                row["retrained"] = errors
            rows.append(row)
            print(row, flush=True)
    return rows


def retrain(model: nn.Module, task: Any, seed: int) -> float:
    """The error after a few more steps by SGD, the rate falling from 0.01 to 0."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, STEPS)
    model.train()
    for batch in task.batches(model, torch.Generator().manual_seed(seed), STEPS):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        schedule.step()
    return float(task.evaluate(model.eval(), "test")["error"])


def print_rows(rows: list[Row]) -> None:
    amounts = [f"{amount:g}" for amount in AMOUNTS[1:]]
    table = []
    for row in rows:
        cells = [f"{row[amount]:.1f}" for amount in amounts]
        again = f"{average([{'x': e} for e in row['retrained']], 'x'):.1f}" if "retrained" in row else ""
        table.append([NETWORKS[row["network"]].label, row["start"], row["way"], *cells, again])
    print_table(["network", "", "by", *(f"{100 * a:g}%" for a in AMOUNTS[1:]), "90%, retrained"], table)


def draw(rows: list[Row]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    styles = {
        "magnitude": ("0.6", "o"), "LAMP": ("C1", "^"), "path importance, p = 2": ("C2", "v"),
        "balance, then magnitude": ("k", "s"),
    }  # fmt: skip
    panels = figure.subplots(1, len(PRUNED), sharey=True)
    for panel, name in zip(panels, PRUNED, strict=True):
        for row in rows:
            if row["network"] == name and row["way"] in styles:
                color, marker = styles[row["way"]]
                is_trained = row["start"] == "as trained"
                errors = [row[f"{amount:g}"] for amount in AMOUNTS]
                panel.plot(
                    [100 * amount for amount in AMOUNTS], errors, "-" if is_trained else ":", color=color,
                    marker=marker, markersize=4, label=row["way"] if is_trained else None,
                )  # fmt: skip
        panel.set_title(NETWORKS[name].label, fontsize=9)
        panel.set_xlabel("weights pruned, %")
    panels[0].set_ylabel("test error, %")
    panels[2].legend(
        frameon=False, fontsize=7, title="dotted: rescaled before", title_fontsize=7, loc="lower right"
    )
    figure.savefig(FIGURES / "uses-pruning.png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if not options.draw:
        write_rows("pruning", [row for name in PRUNED for row in measure(name, options.data)])
    rows = read_rows("pruning")
    print_rows(rows)
    draw(rows)


if __name__ == "__main__":
    main()
