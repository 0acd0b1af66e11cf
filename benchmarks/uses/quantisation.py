"""Quantisation: what rounding the weights of a trained network costs, as trained and with channels equalised.

``python -m benchmarks.uses.quantisation --data FOLDER`` measures what is missing in results/uses, as far as
it can be imported (aimet-torch and brevitas need not be there), and prints the table; ``--draw`` only prints.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pathsgd
from benchmarks.league.tasks import Images

from .imagenet import load_efficientnet_lite0, zero_shot
from .networks import NETWORKS, first_images, fold
from .rows import FIGURES, Row, print_table, read_rows, write_rows

LAYERS = (nn.Conv2d, nn.Linear)
TENSOR_BITS = (8, 7, 6, 5, 4)
ROUNDINGS = {
    **{f"int{bits}": (bits, False, False) for bits in TENSOR_BITS},
    "int8 by channel": (8, True, False),
    "int4 by channel": (4, True, False),
    "int8 and activations": (8, False, True),
    "int4 and activations": (4, False, True),
    "int8 by channel and activations": (8, True, True),
    "int4 by channel and activations": (4, True, True),
}
"""Bits of the weights, whether each output channel has a range of its own, and whether what enters a layer is
rounded to 8 bits, too."""


@torch.no_grad()
def round_weights(model: nn.Module, bits: int, by_channel: bool) -> nn.Module:
    """A copy with the weights of all layers at the nearest of ``2^bits - 1`` levels in their range."""
    model = copy.deepcopy(model)
    top = 2 ** (bits - 1) - 1
    for layer in layers_of(model):
        weight = layer.weight
        largest = weight.abs().flatten(1).amax(1) if by_channel else weight.abs().amax()
        step = (largest / top).clamp(min=1e-30).view(-1, *[1] * (weight.dim() - 1))
        weight.copy_((weight / step).round() * step)
    return model


@torch.no_grad()
def round_activations(model: nn.Module, x: Tensor) -> nn.Module:
    """Rounds what enters every layer to 8 bits in the range that it has on ``x``; in place."""
    ranges: dict[nn.Module, tuple[float, float]] = {}
    watches = [
        layer.register_forward_pre_hook(
            lambda layer, args: ranges.update({layer: (min(0.0, float(args[0].min())), float(args[0].max()))})
        )
        for layer in layers_of(model)
    ]
    model(x)
    for watch in watches:
        watch.remove()
    for layer, (low, high) in ranges.items():
        step = max(max(0.0, high) - low, 1e-30) / 255
        rounded = functools.partial(_round_to_8_bits, step=step, zero=round(-low / step))
        layer.register_forward_pre_hook(rounded)
    return model


def _round_to_8_bits(
    layer: nn.Module, args: tuple[Tensor, ...], step: float, zero: int
) -> tuple[Tensor, ...]:
    return (torch.fake_quantize_per_tensor_affine(args[0], step, zero, 0, 255), *args[1:])


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LAYERS)]


def balanced(p: float, bounds: bool = True) -> Callable[[nn.Module, Tensor], nn.Module]:
    """By ``pathsgd.balance``. A large p equalises the ranges of all channels, in and out."""

    def balance(model: nn.Module, x: Tensor) -> nn.Module:
        model = fold(model)
        if bounds:
            pathsgd.replace_relu6(model, x)
        pathsgd.balance(model, x, p=p, q=p)
        return model

    return balance


def by_aimet(model: nn.Module, x: Tensor) -> nn.Module:
    """Cross-layer equalisation and absorption of high biases by the authors' library."""
    from aimet_torch.cross_layer_equalization import equalize_model

    model = copy.deepcopy(model)
    equalize_model(model, dummy_input=x)
    return model


def by_brevitas(model: nn.Module, x: Tensor, relu6_to_relu: bool = True) -> nn.Module:
    from brevitas.graph.quantize import preprocess_for_quantize

    return preprocess_for_quantize(copy.deepcopy(model), equalize_iters=20, relu6_to_relu=relu6_to_relu)


WAYS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "as trained": lambda model, x: fold(model),
    "AIMET": by_aimet,
    "Brevitas": by_brevitas,
    "Brevitas, ReLU6 kept": functools.partial(by_brevitas, relu6_to_relu=False),
    **{f"balance, p = q = {p}": balanced(p) for p in (2, 4, 8, 16)},
    "balance, p = q = 4, ReLU6 kept": balanced(4, bounds=False),
}


def measure(name: str, ways: Iterable[str], data: Path, known: list[Row]) -> list[Row]:
    """Rows of what is missing among those that are known."""
    if name == "efficientnet-lite0":
        task: Any = zero_shot(data)
        model = load_efficientnet_lite0()
    else:
        task, model = NETWORKS[name].task(data), NETWORKS[name].load()
        task = first_images(task) if isinstance(task, Images) else task
    has_relu6 = any(isinstance(module, nn.ReLU6) for module in model.modules())
    rows = []
    for way in ways:
        if "ReLU6" in way and not has_relu6:
            continue
        row: Row = {"network": name, "way": way}
        row = next((one for one in known if row.items() <= one.items()), row)
        missing = {label: how for label, how in ROUNDINGS.items() if label not in row}
        if not missing:
            continue
        try:
            equalised = WAYS[way](model, task.example)
        except ImportError:
            continue  # its recorded rows are kept
        except Exception as error:
            rows.append({"failure": f"{type(error).__name__}: {error}"[:100], **row})
            print(rows[-1], flush=True)
            continue
        row["float"] = task.evaluate(equalised, "test")[task.metric]
        for label, (bits, by_channel, activations) in missing.items():
            rounded = round_weights(equalised, bits, by_channel)
            if activations:
                round_activations(rounded, calibration_of(task))
            row[label] = task.evaluate(rounded, "test")[task.metric]
            row[f"noise of {label}"] = measure_noise(equalised, rounded, calibration_of(task)[:64])
        rows.append(row)
        print(row, flush=True)
    return rows


@torch.no_grad()
def measure_noise(model: nn.Module, rounded: nn.Module, x: Tensor) -> float:
    """The share of the outputs' variance that rounding adds. It tells ways apart where no answer changes."""
    outputs, noisy = (each(x).flatten(0, -2) for each in (model, rounded))
    return float((noisy - outputs).square().sum() / (outputs - outputs.mean(0)).square().sum())


def calibration_of(task: Any) -> Tensor:
    """What ranges of activations are measured on: training data."""
    if hasattr(task, "x"):
        return task.x[:256]
    return next(task.batches(None, torch.Generator().manual_seed(0), 1))[0]


def merge(old: list[Row], new: list[Row]) -> list[Row]:
    """New rows in the place of old ones, in the order of networks and ways."""
    found = {(row["network"], row["way"]): row for row in [*old, *new]}
    return [found[name, way] for name in LABELS for way in WAYS if (name, way) in found]


LABELS = {
    "efficientnet-lite0": "EfficientNet-Lite0, ImageNet",
    **{name: network.label for name, network in NETWORKS.items()},
}


def show(row: Row, key: str) -> str:
    """The error, and in brackets the noise in percent."""
    if key not in row:
        return "-"
    noise = 100 * row.get(f"noise of {key}", 0.0)
    return f"{row[key]:.3g}" + f" ({noise:.2g})" * (0 < noise < 99) + " (>99)" * (noise >= 99)


def print_rows(rows: list[Row]) -> None:
    kinds = ("by channel", "and activations")
    shown = ("float", "int8", "int6", "int4", *(f"int{bits} {kind}" for kind in kinds for bits in (8, 4)))
    table = []
    for row in rows:
        cells = [show(row, key) for key in shown]
        table.append([LABELS[row["network"]], row["way"], *cells])
    print_table(["network", "", *shown], table)


STYLES = {
    "as trained": ("0.6", "o-"), "AIMET": ("C1", "^:"), "Brevitas": ("C2", "v:"),
    "Brevitas, ReLU6 kept": ("C2", "v-"), "balance, p = q = 4": ("k", "s-"),
}  # fmt: skip


def draw(rows: list[Row]) -> None:
    """The error over the bits of weights, one range a layer, a panel a network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    panels = figure.subplots(2, 3).flatten()
    lines: dict[str, Any] = {}
    for panel, (name, label) in zip(panels, LABELS.items(), strict=True):
        for way, (color, style) in STYLES.items():
            for row in rows:
                if row["network"] == name and row["way"] == way and "float" in row:
                    errors = [row[f"int{bits}"] for bits in TENSOR_BITS]
                    (lines[way],) = panel.plot(TENSOR_BITS, errors, style, color=color, markersize=4)
        panel.set_title(label, fontsize=9)
        panel.invert_xaxis()
        panel.set_xticks(TENSOR_BITS, [f"int{bits}" for bits in TENSOR_BITS])
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[::3]:
        panel.set_ylabel("test error, % (Llama: loss)")
    ordered = {way: lines[way] for way in STYLES if way in lines}
    figure.legend(ordered.values(), ordered, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(FIGURES / "uses-quantisation.png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", help="by default all", default=list(LABELS))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if not options.draw:
        for name in options.networks:
            new = measure(name, options.ways, options.data, read_rows("quantisation"))
            write_rows("quantisation", merge(read_rows("quantisation"), new))
    rows = read_rows("quantisation")
    print_rows(rows)
    draw(rows)


if __name__ == "__main__":
    main()
