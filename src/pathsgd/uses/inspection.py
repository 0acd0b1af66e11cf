"""inspect: a look at a network: by layer, imbalance, dead units, and what rounding its weights loses."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pathsgd.balancing.balance import check_finite
from pathsgd.balancing.imbalance import compare_with_balanced
from pathsgd.errors import PathError
from pathsgd.geometry.gamma import Gammas, measure_gammas
from pathsgd.graph.edge_weights import Tensors
from pathsgd.graph.nodes import Add, Multiply, Stored
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example, trace
from pathsgd.graph.unit_classes import FIXED, unit_classes_of
from pathsgd.graph.unit_groups import Group, Part, find_unit_groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BITS, P = (8, 4), 4
"""What weights are rounded to, and the order of mu that is balanced by before."""
MOST_ROWS, MOST_LETTERS = 60, 36
"""Of a figure, and of a layer's name in it."""


@dataclass(frozen=True)
class InspectedLayer:
    """The units that a module leads into, and the matrices that lead there."""

    name: str
    units: int
    dead: int
    """Units that no live path goes through: all weights into them are zero, or all that lead on."""
    imbalance: tuple[float, ...]
    """log2 of what a unit has been rescaled by, seen from the balanced network; of all units that can be
    rescaled and are not dead. Behind a batch norm those are its outputs."""
    loss: Mapping[int, float]
    """What rounding the matrices to 8 and to 4 bits loses; empty if there are none, or zeros alone."""
    loss_balanced: Mapping[int, float]
    """The same after ``balance(model, x, p=4, q=4)``."""

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The least imbalance, the quartiles with the median in the middle, and the largest; or nothing."""
        values = torch.tensor(self.imbalance, dtype=torch.float64)
        at = values.new_tensor([0, 0.25, 0.5, 0.75, 1])
        return tuple(values.quantile(at).tolist()) if self.imbalance else ()


@dataclass(frozen=True, repr=False)
class Inspection:
    """The result of :func:`pathsgd.inspect`: a notebook shows its figure, ``print`` says it in a sentence.

    Attributes:
        model: the name of the model's class.
        ratio: ``mu_{2,2}`` over that of the balanced network; None where no weight is on a path.
        layers: in order of evaluation. Each has a ``name``, how many ``units`` and how many of them are
            ``dead``, the ``imbalance`` of units in octaves and its ``quantiles``, and by bits (8 and 4) the
            ``loss`` from rounding its weights, and ``loss_balanced``.

    Example:
        >>> import pathsgd
        >>> model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
        >>> _ = model[0].weight.data.fill_(8.0), model[2].weight.data.fill_(1.0)
        >>> _ = model[0].weight.data[2].zero_()
        >>> print(pathsgd.inspect(model))
        Sequential: mu is 2.14 times the balanced one; 1 of 4 units dead; int4 error 0, after balance 0
    """

    model: str
    ratio: float | None
    layers: tuple[InspectedLayer, ...]

    def __str__(self) -> str:
        pooled, ratio = _pool("", self.layers), self.ratio
        parts = [] if ratio is None else [f"mu is {ratio:.3g} times the balanced one"]
        parts.append(f"{pooled.dead or 'none'} of {pooled.units} units dead")
        if pooled.loss:
            parts.append(f"int4 error {pooled.loss[4]:.2g}, after balance {pooled.loss_balanced[4]:.2g}")
        return f"{self.model}: {'; '.join(parts)}"

    def __repr__(self) -> str:
        return f"<{self}>"

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.draw().savefig(buffer, format="png")
        return buffer.getvalue()

    def draw(self) -> Figure:
        """Draws a row for each layer: on the left the imbalance of its units (the range, the quartiles as a
        bar, the median), on the right what rounding loses. Of more than 60 layers, those whose names differ
        in numbers alone share a row, with the mean of their losses.

        Returns:
            A Figure of matplotlib, without pyplot: ``draw().savefig("network.png")``.

        Raises:
            PathError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise PathError("the figure needs matplotlib: pip install matplotlib") from error
        rows = _pool_alike(self.layers) if len(self.layers) > MOST_ROWS else self.layers
        shown, left_out = rows[:MOST_ROWS], len(rows[MOST_ROWS:])
        figure = Figure(figsize=(11, 1.6 + 0.21 * len(shown)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_imbalance(left, shown)
        _draw_losses(right, shown)
        left.set_ylim(len(shown) - 0.4, -1)
        for axes in (left, right):
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
        figure.suptitle(f"{self}; {left_out} rows left out" if left_out else str(self), fontsize=11)
        return figure


@torch.no_grad()
def inspect(model: nn.Module, example_input: Example | PathGraph | None = None) -> Inspection:
    """Measures how unbalanced a model is, which units are dead, and what rounding its weights loses.

    Every matrix is rounded as a whole: symmetric, from its largest entry, to nearest. The loss is the part of
    the layer's path norm that is lost, ``sum gamma (w - Q(w))^2 / sum gamma w^2``; inside a region a
    rescaling changes it through Q alone. Where no path is live, gamma counts as 1. The model is not changed.

    Args:
        model: the module to measure.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.

    Returns:
        An :class:`Inspection`, which can draw itself.

    Raises:
        TraceError: the model cannot be traced.
        PathError: a parameter is not finite or is sharded, or the graph is of another model.

    Example:
        >>> import pathsgd
        >>> model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> pathsgd.rescale(model, None, {("0", 7): 32.0})
        >>> first, last = pathsgd.inspect(model).layers
        >>> first.name, first.quantiles[-1] > 3, first.loss[4] > first.loss_balanced[4]
        ('0', True, True)
    """
    graph = trace(model, example_input)
    tensors = {name: tensor.detach() for name, tensor in graph.tensors(model).items()}
    check_finite(graph.parameters, tensors)
    mu, least, octaves, _ = compare_with_balanced(graph, tensors, 2, 2)
    *_, balanced = compare_with_balanced(graph, tensors, P, P)
    both = [(each, measure_gammas(graph, each)) for each in (tensors, balanced)]
    layers = []
    for row in _find_rows(graph, *both[0], -octaves):
        live, imbalance = torch.cat(row.live), torch.cat(row.imbalance).tolist()
        losses = [_measure_loss(row.matrices, *each) for each in both]
        layers.append(InspectedLayer(row.name, len(live), int((~live).sum()), tuple(imbalance), *losses))
    return Inspection(graph.model, mu / least if least else None, tuple(layers))


@dataclass(eq=False)
class _Row:
    """A layer, as its groups of units are found."""

    name: str
    matrices: list[str] = field(default_factory=list)
    live: list[Tensor] = field(default_factory=list)
    imbalance: list[Tensor] = field(default_factory=list)


def _find_rows(graph: PathGraph, tensors: Tensors, gammas: Gammas, octaves: Tensor) -> list[_Row]:
    """The layers in order of evaluation, without gains that give no unit a factor of its own, as PReLU's."""
    units, seen = unit_classes_of(graph), {FIXED}
    rows: dict[str, _Row] = {}
    row_of: dict[int, _Row] = {}

    def matrices_of(group: Group) -> list[str]:
        names = dict.fromkeys(_parameter(part).name for part in group.parts)
        return [name for name in names if len(graph.parameters[name].shape) > 1]

    # Gains last: of batch norms that are added up, one may come before the other's convolution.
    for group in sorted(find_unit_groups(graph), key=lambda group: not matrices_of(group)):
        first, matrices = _parameter(group.parts[0]).name, matrices_of(group)
        classes, live = group.heads(units), _find_live(group, tensors, gammas)
        before = [] if matrices else _rows_before(graph, group, row_of)
        if matrices or not (before or set(classes.tolist()) <= seen):
            module = first.rpartition(".")[0]
            name = module if module in units.owners else first
            row = rows.setdefault(name, _Row(name))
            row.matrices += [each for each in matrices if each not in row.matrices]
            row.live.append(live)
            row_of.update({part.node: row for part in group.parts})
            before = [row]
        for row in before:
            row.imbalance.append(octaves[classes[live & (classes != FIXED)]])
        seen.update(classes.tolist())
    return list(dict.fromkeys(row_of[k] for k in sorted(row_of)))


def _parameter(part: Part) -> Stored:
    assert part.operation.weight.parameter is not None
    return part.operation.weight.parameter


def _rows_before(graph: PathGraph, group: Group, row_of: Mapping[int, _Row]) -> list[_Row]:
    """The layers whose units the gains of a batch norm multiply: they are rescaled there, not before."""
    readers, found = graph.readers(), []
    for part in group.parts:
        if isinstance(part.operation, Multiply):
            (k,) = graph.nodes[part.node].inputs
            while len(readers[k]) == 1 and isinstance(graph.nodes[k].operation, Add):
                k = graph.nodes[k].inputs[0]
            if len(readers[k]) == 1 and k in row_of and not any(map(len, row_of[k].imbalance)):
                found.append(row_of[k])
    return found


def _find_live(group: Group, tensors: Tensors, gammas: Gammas) -> Tensor:
    """Whether a live path goes through a unit: whether gamma w^2 of any weight into it is not 0."""
    live = []
    for part in group.parts:
        name, shift = _parameter(part).name, _parameter(part).shift
        is_live = (tensors[name] + shift != 0) & (gammas[name].log2() > -torch.inf)
        rows = part.rows({**tensors, name: is_live.float() - shift}, torch.float32)
        live.append((rows != 0).any(1).cpu())
    return torch.stack(live).any(0)


def _measure_loss(names: Sequence[str], tensors: Tensors, gammas: Gammas) -> dict[int, float]:
    """By bits, the part of ``sum gamma w^2`` over some matrices that rounding them loses."""
    known = [(tensors[name].double(), gammas[name].log2()) for name in names if tensors[name].numel()]
    if any(bool((log[w != 0] > -torch.inf).any()) for w, log in known):
        top = max(float(log.max()) for _, log in known)  # alone gamma may be out of range
        pairs = [(w, (log - top).exp2()) for w, log in known]
    else:
        pairs = [(w, torch.ones_like(w)) for w, _ in known]
    whole = sum(float((w.square() * gamma).sum()) for w, gamma in pairs)
    lost = {bits: sum(float((_round_off(w, bits) * gamma).sum()) for w, gamma in pairs) for bits in BITS}
    return {bits: part / whole for bits, part in lost.items()} if whole else {}


def _round_off(weight: Tensor, bits: int) -> Tensor:
    """The squared distance to the nearest of ``2^bits - 1`` steps from the least to the largest size."""
    step = weight.abs().max().clamp(min=1e-300) / (2 ** (bits - 1) - 1)  # of zeros, any
    return ((weight / step).round_() * step - weight).square_()


def _pool(name: str, layers: Sequence[InspectedLayer]) -> InspectedLayer:
    """Layers as one, with the mean of their losses."""
    known = [layer for layer in layers if layer.loss]
    loss = {bits: fmean(layer.loss[bits] for layer in known) for bits in BITS if known}
    balanced = {bits: fmean(layer.loss_balanced[bits] for layer in known) for bits in BITS if known}
    units, dead = sum(layer.units for layer in layers), sum(layer.dead for layer in layers)
    imbalance = tuple(octaves for layer in layers for octaves in layer.imbalance)
    return InspectedLayer(name, units, dead, imbalance, loss, balanced)


def _pool_alike(layers: Sequence[InspectedLayer]) -> list[InspectedLayer]:
    """Layers whose names differ in numbers alone as one: ``blocks.*.linear``."""
    alike: dict[str, list[InspectedLayer]] = {}
    for layer in layers:
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", layer.name), []).append(layer)
    return [_pool(f"{len(own)} x {name}", own) if len(own) > 1 else own[0] for name, own in alike.items()]


def _draw_imbalance(axes: Axes, layers: Sequence[InspectedLayer]) -> None:
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.plot([-1, 1], [0, 0], linestyle="none")  # what is far below an octave shall look small
    for k, layer in enumerate(layers):
        if layer.imbalance:
            least, lower, median, upper, largest = layer.quantiles
            axes.plot([least, largest], [k, k], color="0.45", linewidth=1)
            axes.plot([lower, upper], [k, k], color="0.45", linewidth=5, solid_capstyle="butt")
            axes.plot(median, k, "|", color="black", markersize=9, markeredgewidth=1.5)
        if layer.dead:
            axes.annotate(f"{layer.dead} dead", (1, k), xycoords=axes.get_yaxis_transform(), va="center")
    names = [re.sub(f".*(.{{{MOST_LETTERS}}})", r"...\1", layer.name) for layer in layers]
    labels = [f"{name} \u00b7 {layer.units}" for name, layer in zip(names, layers, strict=True)]
    axes.set_yticks(range(len(layers)), labels)
    axes.locator_params(axis="x", nbins=5)
    axes.set_title("layer \u00b7 units, and their imbalance in octaves", fontsize=10)
    if not any(layer.imbalance for layer in layers):
        axes.text(0, (len(layers) - 1) / 2, "no unit can be rescaled", ha="center", backgroundcolor="white")


def _draw_losses(axes: Axes, layers: Sequence[InspectedLayer]) -> None:
    axes.set_xscale("log")
    for bits, color, shift in zip(BITS, ("#5b9bd5", "#1f3864"), (-0.13, 0.13), strict=True):
        rows = [k for k, layer in enumerate(layers) if layer.loss]
        for k in rows:
            # On a logarithmic axis nothing is drawn as next to nothing.
            now, balanced = (max(loss[bits], 1e-8) for loss in (layers[k].loss, layers[k].loss_balanced))
            axes.plot([now, balanced], [k + shift] * 2, color=color, linewidth=1)
            axes.plot(balanced, k + shift, "o", color=color, markersize=5)
            axes.plot(now, k + shift, "o", color=color, markersize=6, markerfacecolor="none")
            if k == rows[0]:
                axes.annotate(f"int{bits}", (balanced, k - 0.35), color=color, ha="center", va="bottom")
    axes.grid(axis="x", color="0.9")
    axes.set_title("lost by rounding: now (hollow), after balance (filled)", fontsize=10)
    axes.set_xlabel(f"part of the layer's path norm; balanced with p = q = {P}", fontsize=9)
