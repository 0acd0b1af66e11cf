"""The small language a traced network is written in.

Every operator of a network is lowered (by :mod:`pathsgd.graph.rules`) to these few operations. Each is
*linear with non-negative coefficients* in the powered network of Algorithm 1, so each has an adjoint in
the same language: the backward pass is a forward pass over adjoints. They hold names and numbers, never
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Shape = tuple[int, ...]


# Data movement: permutes, copies or drops units, and multiplies by nothing.


@dataclass(frozen=True)
class Reshape:
    """All units in the same order under another shape."""

    shape: Shape


@dataclass(frozen=True)
class Permute:
    """Axes in another order: output axis k is input axis ``dims[k]``."""

    dims: Shape


@dataclass(frozen=True)
class Slice:
    """``length`` entries of one axis, from ``start`` in steps of ``step``."""

    dim: int
    start: int
    length: int
    step: int = 1


@dataclass(frozen=True)
class Embed:
    """The adjoint of :class:`Slice`: entries put back into an axis of ``size`` zeros."""

    dim: int
    start: int
    size: int
    step: int = 1


@dataclass(frozen=True)
class Expand:
    """Axes of size one repeated up to ``shape`` (same number of axes)."""

    shape: Shape


@dataclass(frozen=True)
class Reduce:
    """The sum over the axes ``dims``, kept with size one. The adjoint of :class:`Expand`."""

    dims: Shape


@dataclass(frozen=True)
class Cat:
    """Several values joined along one axis."""

    dim: int


View = Reshape | Permute | Slice | Embed | Expand


# Weights: what stands on the edges.


@dataclass(frozen=True)
class Stored:
    """A tensor the model owns (by name) or a literal of its code, seen through ``views``."""

    shape: Shape
    name: str = ""
    literal: tuple[float, ...] = ()
    views: tuple[View, ...] = ()
    inverse: bool = False
    shift: float = 0.0
    """What is added to the tensor, as where a gain is stored without its 1."""
    inverse_sigma: float | None = None
    """If set, the tensor is a variance and stands for 1/sqrt(variance + this)."""


@dataclass(frozen=True)
class Weight:
    """Edge weights: a parameter (or none) times fixed factors, broadcast against each other to ``shape``."""

    shape: Shape
    parameter: Stored | None
    factors: tuple[Stored, ...] = ()
    role: str = "weight"

    def as_role(self, role: str) -> Weight:
        return replace(self, role=role)


def number(value: float) -> Weight:
    """A fixed edge weight that is one number."""
    return Weight((), None, (Stored((), literal=(float(value),)),), "constant")


# Operations on paths.


@dataclass(frozen=True)
class Begin:
    """Units where paths begin: inputs of the network, and whatever a non-homogeneous operator returns."""

    reason: str
    products: str = ""
    """If every value is a sum of products of one entry each of what it is computed from, which ones, as for
    einsum. Paths end there, but rescalings pass."""


@dataclass(frozen=True)
class Weighted:
    """Edges with weights."""

    weight: Weight


@dataclass(frozen=True)
class Source(Weighted):
    """Edges from the constant unit (a bias), broadcast to the node's shape."""


@dataclass(frozen=True)
class Linear(Weighted):
    """``y[..., o] = sum_i W[o, i] x[..., i]``."""


@dataclass(frozen=True)
class Conv(Weighted):
    """A convolution, or its transpose, over the axes after (batch, channel), without bias."""

    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int = 1
    transposed: bool = False
    output_padding: Shape = ()

    @property
    def is_depthwise(self) -> bool:
        """Whether every output sees one input channel."""
        inputs = self.weight.shape[0] // self.groups if self.transposed else self.weight.shape[1]
        return self.groups > 1 and inputs == 1


@dataclass(frozen=True)
class Multiply(Weighted):
    """One edge from each unit to the unit in the same place: ``y = w * x`` with ``w`` broadcast."""


@dataclass(frozen=True)
class Add:
    """Edges of fixed weight 1 from several values into one: sums, differences, the pieces of a maximum."""


@dataclass(frozen=True)
class Window:
    """A map from the entries of one axis to those of another: pooling, padding, resizing, gathering.

    ``kind`` is one of ``sum`` and ``mean`` (sliding windows; ``mean`` divides as average pooling does),
    ``adaptive_sum`` and ``adaptive_mean``, ``resize`` (linear interpolation), ``gather`` (``index``).
    """

    kind: str
    size: int
    out: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    count_include_pad: bool = True
    align_corners: bool = False
    ratio: float | None = None
    index: Shape = ()


@dataclass(frozen=True)
class AxisMap:
    """Fixed edges along one axis, the same at every other place: ``y[o] = sum_i A[o, i] x[i]``."""

    dim: int
    window: Window
    adjoint: bool = False

    @property
    def copies(self) -> bool:
        """Whether it only moves and repeats numbers, as a view does."""
        return self.window.kind == "gather" and not self.adjoint and -1 not in self.window.index


@dataclass(frozen=True)
class Square:
    """``y = x^2``, for the squared ReLU: two paths meet in one unit."""


Operation = (
    Begin | Source | Linear | Conv | Multiply | Add | AxisMap | Square | Cat
    | Reshape | Permute | Slice | Embed | Expand | Reduce
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """One value of the network: the operation that makes it, from which earlier values, at batch one."""

    operation: Operation
    inputs: tuple[int, ...]
    shape: Shape
    where: str = ""
    """The module whose forward made this value, for reports and errors."""


def conv_channels(conv: Conv) -> tuple[int, int]:
    """The numbers of input and of output channels of a convolution."""
    first, second = conv.weight.shape[:2]
    return (first, second * conv.groups) if conv.transposed else (second * conv.groups, first)
