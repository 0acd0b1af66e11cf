"""Unroll a small torch network into an explicit Dag, one loop per operator, for use as an oracle.

It shares no code with ``pathsgd.graph`` or ``pathsgd.geometry``: nothing is traced or inferred. A
test writes its network down a second time, and the Dag then lists every path::

    w = parameters(model)
    net = Unroller()
    x = net.input((2, 5, 5))
    x = net.relu(net.conv(x, w["0.weight"], w["0.bias"], padding=1))
    x = net.linear(x.reshape(-1), w["3.weight"], w["3.bias"])
    dag = net.dag(x)
    dag.phi(2), net.parameter_gamma(dag, p=2)["0.weight"]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor, nn

from pathsgd.dag import Dag

Array = np.ndarray[Any, Any]
Index = tuple[int, ...]
Sizes = int | Sequence[int]
Edge = tuple[str, str]
Windows = dict[Index, list[tuple[Index, Index]]]  # output position -> (tap, input position) pairs


@dataclass(frozen=True)
class Weight:
    """One element of a parameter, as it stands on an edge: the edge weighs ``factor * value``."""

    name: str
    shape: tuple[int, ...]
    index: Index
    value: float
    factor: float = 1.0

    def times(self, factor: float) -> Weight:
        return replace(self, factor=self.factor * factor)


def parameter(name: str, tensor: Tensor) -> Array:
    """An object array of Weights in the tensor's shape: transpose, slice and reshape it freely."""
    weights = np.empty(tuple(tensor.shape), dtype=object)
    for index in np.ndindex(*weights.shape):
        weights[index] = Weight(name, weights.shape, index, tensor[index].item())
    return weights


def parameters(model: nn.Module) -> dict[str, Array]:
    """Every parameter of the model; a shared one appears under its first name only."""
    return {name: parameter(name, tensor) for name, tensor in model.named_parameters()}


@dataclass
class Unroller:
    """A network under construction: edges so far, and which parameter element each one carries.

    A layer's value is a numpy array of unit names in the activation's shape without the batch axis,
    (C, H, W) for an image. So reshape, cat, slice and permute are numpy on that array and make no
    unit. Dropout, leaky relu and abs have the path rule of the identity: pass the value on. UnitClasses
    are linear unless they come out of ``relu``. A Weight makes an edge that carries a parameter, a
    number one that is fixed.
    """

    weights: dict[Edge, float] = field(default_factory=dict)
    labels: dict[Edge, Weight] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    rectified: set[str] = field(default_factory=set)
    layers: int = 0

    def _units(self, kind: str, shape: Sequence[int], kept_in: list[str]) -> Array:
        """New units named ``kind3[c,i,j]``, the number being that of the layer."""
        self.layers += 1
        units = np.empty(tuple(shape), dtype=object)
        for index in np.ndindex(*units.shape):
            units[index] = f"{kind}{self.layers}[{','.join(map(str, index))}]"
            kept_in.append(units[index])
        return units

    def _edge(self, u: str, v: str, weight: float | Weight) -> None:
        """Join u to v: a number is a fixed weight, a Weight is a parameter's."""
        if (u, v) in self.weights:  # the same unit twice: a Dag has no parallel edges
            between = f"{u}=>{v}#{len(self.weights)}"
            self.hidden.append(between)
            self._edge(u, between, 1.0)
            u = between
        if isinstance(weight, Weight):
            self.labels[u, v] = weight
            self.weights[u, v] = weight.factor * weight.value
        else:
            self.weights[u, v] = float(weight)

    def one(self) -> str:
        """A new constant unit."""
        unit: str = self._units("one", (), self.constants)[()]
        return unit

    def input(self, shape: Sequence[int]) -> Array:
        return self._units("input", shape, self.inputs)

    def relu(self, x: Array) -> Array:
        """New units, so that x itself can still be used without the activation."""
        y = self.multiply(x, 1.0)
        self.rectified.update(y.flat)
        return y

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """``y[..., o] = sum_i x[..., i] W[o, i] + b[o]``; an array of numbers is a fixed matrix."""
        y = self._units("linear", (*x.shape[:-1], len(weight)), self.hidden)
        for position in np.ndindex(*x.shape[:-1]):
            for o, i in np.ndindex(*weight.shape):
                self._edge(x[(*position, i)], y[(*position, o)], weight[o, i])
        self._bias(y, bias, channel_axis=-1)
        return y

    def conv(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Array:
        """``y[o, s] = b[o] + sum x[i, s * stride - padding + tap * dilation] W[o, i, tap]``."""
        out_channels, in_per_group, *kernel = weight.shape
        windows = sliding_windows(x.shape[1:], kernel, stride, padding, dilation)
        y = self._units("conv", (out_channels, *_grid(windows)), self.hidden)
        for o in range(out_channels):
            group = o // (out_channels // groups)
            for s, window in windows.items():
                for tap, place in window:
                    for i in range(in_per_group):
                        source = x[(group * in_per_group + i, *place)]
                        self._edge(source, y[(o, *s)], weight[(o, i, *tap)])
        self._bias(y, bias, channel_axis=0)
        return y

    def conv_transpose(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> Array:
        """``y[o, s * stride - padding + tap * dilation] += x[i, s] W[i, o, tap]``, then b[o]."""
        in_channels, out_per_group, *kernel = weight.shape
        rank = len(kernel)
        stride, padding, dilation = (_sizes(n, rank) for n in (stride, padding, dilation))
        extra = _sizes(output_padding, rank)
        out_size = [
            (x.shape[1 + d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (kernel[d] - 1) + 1
            for d in range(rank)
        ]
        out_size = [size + more for size, more in zip(out_size, extra, strict=True)]
        y = self._units("conv_transpose", (groups * out_per_group, *out_size), self.hidden)
        for i in range(in_channels):
            group = i // (in_channels // groups)
            for s, tap in product(np.ndindex(*x.shape[1:]), np.ndindex(*kernel)):
                place = _place(s, tap, stride, padding, dilation)
                if _inside(place, out_size):
                    for o in range(out_per_group):
                        target = y[(group * out_per_group + o, *place)]
                        self._edge(x[(i, *s)], target, weight[(i, o, *tap)])
        self._bias(y, bias, channel_axis=0)
        return y

    def _bias(self, y: Array, bias: Array | None, channel_axis: int) -> None:
        if bias is not None:
            one = self.one()
            for index in np.ndindex(*y.shape):
                self._edge(one, y[index], bias[index[channel_axis]])

    def embedding(self, one_hot: Array, weight: Array) -> Array:
        """``y[..., d] = sum_token one_hot[..., token] W[token, d]``: every row is on a path."""
        return self.linear(one_hot, weight.T)

    def batch_norm(
        self,
        x: Array,
        weight: Array | None,
        bias: Array | None,
        mean: Tensor,
        var: Tensor,
        eps: float = 1e-5,
    ) -> Array:
        """``w / sigma`` from x, ``-mean w / sigma`` and ``b`` from a constant each."""
        y = self._units("batch_norm", x.shape, self.hidden)
        minus_mean = self.one()
        for index in np.ndindex(*x.shape):
            c = index[0]
            per_sigma = 1 / math.sqrt(var[c].item() + eps)
            for unit, factor in ((x[index], per_sigma), (minus_mean, -mean[c].item() * per_sigma)):
                self._edge(unit, y[index], factor if weight is None else weight[c].times(factor))
        self._bias(y, bias, channel_axis=0)
        return y

    def max_pool(
        self,
        x: Array,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> Array:
        """An edge of weight 1 from all of the window: right for paths, not for ``forward``."""
        stride = kernel if stride is None else stride
        windows = sliding_windows(x.shape[1:], kernel, stride, padding, dilation, ceil_mode)
        return self._pool("max_pool", x, windows, dict.fromkeys(windows, 1))

    def avg_pool(
        self,
        x: Array,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        """An edge of weight 1 / divisor from all of the window, with torch's divisor."""
        stride = kernel if stride is None else stride
        windows = sliding_windows(x.shape[1:], kernel, stride, padding, 1, ceil_mode)
        divisors = {s: len(window) for s, window in windows.items()}
        if divisor_override is not None:
            divisors = dict.fromkeys(windows, divisor_override)
        elif count_include_pad:
            rank = x.ndim - 1
            kernel, stride, padding = (_sizes(n, rank) for n in (kernel, stride, padding))
            for s in windows:
                starts = [s[d] * stride[d] - padding[d] for d in range(rank)]
                # With ceil_mode the last window may reach beyond even the padding.
                ends = [min(starts[d] + kernel[d], x.shape[1 + d] + padding[d]) for d in range(rank)]
                divisors[s] = math.prod(end - start for start, end in zip(starts, ends, strict=True))
        return self._pool("avg_pool", x, windows, divisors)

    def adaptive_avg_pool(self, x: Array, out_size: Sizes) -> Array:
        windows = adaptive_windows(x.shape[1:], out_size)
        divisors = {s: len(window) for s, window in windows.items()}
        return self._pool("avg_pool", x, windows, divisors)

    def adaptive_max_pool(self, x: Array, out_size: Sizes) -> Array:
        """As ``max_pool``: right for paths, not for ``forward``."""
        windows = adaptive_windows(x.shape[1:], out_size)
        return self._pool("max_pool", x, windows, dict.fromkeys(windows, 1))

    def _pool(self, kind: str, x: Array, windows: Windows, divisors: dict[Index, int]) -> Array:
        y = self._units(kind, (len(x), *_grid(windows)), self.hidden)
        for c, (s, window) in product(range(len(x)), windows.items()):
            for _, place in window:
                self._edge(x[(c, *place)], y[(c, *s)], 1 / divisors[s])
        return y

    def sum(self, x: Array, axes: Sizes, keepdim: bool = False) -> Array:
        """Also the path rule of a maximum over the axes: maxout, global max pooling."""
        reduced = {axis % x.ndim for axis in ([axes] if isinstance(axes, int) else axes)}
        shape = [1 if axis in reduced else size for axis, size in enumerate(x.shape)]
        y = self._units("sum", shape, self.hidden)
        for index in np.ndindex(*x.shape):
            target = tuple(0 if axis in reduced else i for axis, i in enumerate(index))
            self._edge(x[index], y[target], 1.0)
        return y if keepdim else y.squeeze(tuple(reduced))

    def mean(self, x: Array, axes: Sizes, keepdim: bool = False) -> Array:
        y = self.sum(x, axes, keepdim)
        return self.multiply(y, y.size / x.size)

    def add(self, *xs: Array, signs: Sequence[float] | None = None) -> Array:
        """``sum_k signs[k] * xs[k]`` along fixed edges, shapes broadcast."""
        terms = np.broadcast_arrays(*xs)
        y = self._units("add", terms[0].shape, self.hidden)
        for term, sign in zip(terms, signs or [1.0] * len(terms), strict=True):
            for index in np.ndindex(*y.shape):
                self._edge(term[index], y[index], sign)
        return y

    def multiply(self, x: Array, factor: float | Tensor | Array) -> Array:
        """``factor * x`` along fixed edges; an array of factors broadcasts."""
        return self.multiply_by_parameter(x, np.asarray(factor))

    def multiply_by_parameter(self, x: Array, weight: Array) -> Array:
        """``weight * x`` elementwise, shapes broadcast."""
        terms, factors = np.broadcast_arrays(x, weight)
        y = self._units("multiply", terms.shape, self.hidden)
        for index in np.ndindex(*y.shape):
            self._edge(terms[index], y[index], factors[index])
        return y

    def shift_param(self, x: Array, weight: Array) -> Array:
        """``x + weight`` elementwise, shapes broadcast: an edge from a constant, as a bias is."""
        terms, shifts = np.broadcast_arrays(x, weight)
        y, one = self.multiply(terms, 1.0), self.one()
        for index in np.ndindex(*y.shape):
            self._edge(one, y[index], shifts[index])
        return y

    def prelu(self, x: Array, slope: Array) -> Array:
        """An edge of weight 1 and one of the slope: right for paths, not for ``forward``."""
        y = self.multiply(x, 1.0)
        for index in np.ndindex(*x.shape):
            self._edge(x[index], y[index], slope[index[0] if len(slope) > 1 else 0])
        return y

    def dag(self, *outputs: Array, max_paths: int = 100_000) -> Dag[str]:
        """The network from all inputs to these values, each joined to an output unit of its own."""
        weights, names = dict(self.weights), []
        for k, value in enumerate(outputs):
            for index in np.ndindex(*value.shape):
                names.append(f"output{k}[{','.join(map(str, index))}]")
                weights[value[index], names[-1]] = 1.0
        # Where a transposed convolution leaves a gap, or a window lies in the padding, nothing
        # arrives: the unit is zero, and a Dag wants to hear so.
        fed = {v for _, v in weights}
        dead = [unit for unit in self.hidden if unit not in fed]
        weights.update({("nothing", unit): 0.0 for unit in dead})
        return Dag(
            weights,
            inputs=self.inputs,
            outputs=names,
            constants=[*self.constants, "nothing"],
            fixed=[edge for edge in weights if edge not in self.labels],
            linear=[unit for unit in self.hidden if unit not in self.rectified],
            max_paths=max_paths,
        )

    def forward(self, dag: Dag[str], *values: Tensor) -> Array:
        """The outputs of the Dag in one flat array, given one tensor for each call of ``input``."""
        flat = np.concatenate([value.detach().numpy().reshape(-1) for value in values])
        x = dict(zip(dag.inputs, flat.tolist(), strict=True))
        return np.array(list(dag.forward(x).values()))

    def parameter_gamma(self, dag: Dag[str], p: float) -> dict[str, Array]:
        """``(sum_e |factor_e|^p gamma_e^(p/2))^(2/p)`` over the edges e that carry an element.

        That is kappa1, which counts a path as often as it uses the element; for p = inf it is
        ``max_e |factor_e|^2 gamma_e``.
        """
        gamma = dag.gamma(p)
        totals = {label.name: np.zeros(label.shape) for label in self.labels.values()}
        for edge, label in self.labels.items():
            total, root = totals[label.name], abs(label.factor) * math.sqrt(gamma[edge])
            if p == math.inf:
                total[label.index] = max(total[label.index], root)
            else:
                total[label.index] += root**p
        exponent = 2 if p == math.inf else 2 / p
        return {name: total**exponent for name, total in totals.items()}

    def counted_gamma(self, dag: Dag[str], p: float, count: Callable[[int], float]) -> dict[str, Array]:
        """gamma of shared weights by enumeration: a path that uses an element k times, seen with one of
        those uses left out, counts ``count(k)`` times. ``count(k) = k`` is :meth:`parameter_gamma`."""
        totals = {label.name: np.zeros(label.shape) for label in self.labels.values()}
        for path in dag.paths():
            uses: dict[tuple[str, Index], list[int]] = {}
            for k, edge in enumerate(path):
                if (label := self.labels.get(edge)) is not None:
                    uses.setdefault((label.name, label.index), []).append(k)
            for (name, index), places in uses.items():
                rest = math.prod(abs(dag.weights[e]) ** p for k, e in enumerate(path) if k != places[0])
                own = abs(self.labels[path[places[0]]].factor) ** p
                totals[name][index] += count(len(places)) * own * rest
        return {name: total ** (2 / p) for name, total in totals.items()}


def sliding_windows(
    in_size: Sequence[int],
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool = False,
) -> Windows:
    """The windows of a convolution or pooling; what lies in the padding is left out."""
    rank = len(in_size)
    kernel, stride, padding, dilation = (_sizes(n, rank) for n in (kernel, stride, padding, dilation))
    out_size = []
    for d in range(rank):
        room = in_size[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1
        steps = math.ceil(room / stride[d]) if ceil_mode else room // stride[d]
        if ceil_mode and steps * stride[d] >= in_size[d] + padding[d]:
            steps -= 1  # torch drops a window that starts in the padding at the end
        out_size.append(steps + 1)
    windows: Windows = {s: [] for s in np.ndindex(*out_size)}
    for s, tap in product(windows, np.ndindex(*kernel)):
        place = _place(s, tap, stride, padding, dilation)
        if _inside(place, in_size):
            windows[s].append((tap, place))
    return windows


def adaptive_windows(in_size: Sequence[int], out_size: Sizes) -> Windows:
    """Window s of n over m inputs runs from floor(s m / n) to ceil((s + 1) m / n)."""
    out_size = _sizes(out_size, len(in_size))
    windows: Windows = {}
    for s in np.ndindex(*out_size):
        ranges = [
            range(i * m // n, -((i + 1) * m // -n)) for i, m, n in zip(s, in_size, out_size, strict=True)
        ]
        windows[s] = [((), place) for place in product(*ranges)]
    return windows


def _grid(windows: Windows) -> Index:
    return tuple(1 + max(positions) for positions in zip(*windows, strict=True))


def _place(s: Index, tap: Index, stride: Index, padding: Index, dilation: Index) -> Index:
    return tuple(s[d] * stride[d] - padding[d] + tap[d] * dilation[d] for d in range(len(s)))


def _inside(place: Index, size: Sequence[int]) -> bool:
    return all(0 <= i < n for i, n in zip(place, size, strict=True))


def _sizes(size: Sizes, rank: int) -> Index:
    return (size,) * rank if isinstance(size, int) else tuple(size)
