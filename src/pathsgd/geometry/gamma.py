"""gamma, the scale of every weight: gamma(u -> v) = (gamma_in(u) gamma_out(v))^(2/p) (Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pathsgd.errors import PathError
from pathsgd.geometry import shared_weights as sharing
from pathsgd.geometry.edge_weights import Tensors, reduced_to, to_parameter
from pathsgd.geometry.extended_float import DEAD, Arithmetic, ExtendedFloat, shift
from pathsgd.geometry.operations.convolution import weight_adjoint
from pathsgd.geometry.operations.movement import move
from pathsgd.geometry.passes import PoweredNetwork, Values, powered_network
from pathsgd.geometry.precision import full_precision
from pathsgd.geometry.range_check import RangeCheck
from pathsgd.geometry.shared_weights import Shared, check_shared
from pathsgd.graph.nodes import Add, Conv, Expand, Linear, Permute, Reshape, Scale, Shape, Source, Weighted
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.trace import Example, trace


@dataclass(frozen=True)
class Gamma:
    """The scale of one parameter.

    Where the parameter is the matrix of one linear layer, ``gamma_out`` (one number per row) and
    ``gamma_in`` (one per column) are its two factors and no matrix is stored; elsewhere ``whole``
    holds their product for every entry. All three are sums over paths, before the power 2/p.
    """

    arithmetic: Arithmetic
    shape: tuple[int, ...]
    gamma_out: ExtendedFloat | None = None
    gamma_in: ExtendedFloat | None = None
    whole: ExtendedFloat | None = None
    _kept: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list, repr=False)

    @property
    def rank_one(self) -> bool:
        return self.whole is None

    def product(self) -> ExtendedFloat:
        """``gamma_in gamma_out`` for every entry."""
        if self.whole is not None:
            return self.whole
        assert self.gamma_out is not None
        assert self.gamma_in is not None
        column = move(Reshape((-1, 1)), self.gamma_out)
        row = move(Reshape((1, -1)), self.gamma_in)
        mantissa = column.mantissa * row.mantissa
        if column.exponent is None or row.exponent is None:
            return ExtendedFloat(mantissa)
        return ExtendedFloat(mantissa, (column.exponent + row.exponent).clamp(min=DEAD))

    def times(self, factor: Tensor) -> Gamma:
        """This scale with the sum over paths multiplied, entry by entry."""
        product = self.product()
        whole = ExtendedFloat(product.mantissa * factor.to(product.mantissa.dtype), product.exponent)
        return Gamma(self.arithmetic, self.shape, whole=whole)

    def dense(self) -> Tensor:
        """gamma as a tensor of the parameter's shape. May over- or underflow where ``log2`` does not."""
        product = self.product()
        gamma = self.arithmetic.root(product.mantissa, 2)
        if product.exponent is None:
            return gamma
        return shift(gamma, 2 * product.exponent)

    def roots(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """sqrt(gamma) = (gamma_in gamma_out)^(1/p) as factors that broadcast: (root, 1/root, exponent)."""
        if self._kept:
            return self._kept
        if self.whole is not None:
            factors = [self.whole]
        else:
            assert self.gamma_out is not None
            assert self.gamma_in is not None
            factors = [move(Reshape((-1, 1)), self.gamma_out), move(Reshape((1, -1)), self.gamma_in)]
        for factor in factors:
            root = self.arithmetic.root(factor.mantissa)
            self._kept.append((root, torch.where(root > 0, 1 / root, 0), factor.exponent))
        return self._kept

    def weight_to_z(self, weight: Tensor) -> Tensor:
        """``z = w sqrt(gamma)``: a weight in invariant coordinates."""
        x = weight
        for root, _, exponent in self.roots():
            x = x * root
            x = x if exponent is None else shift(x, exponent)
        return x

    def gradient_to_z(self, gradient: Tensor) -> Tensor:
        """``h = g / sqrt(gamma)``, the gradient of z; 0 where gamma is 0."""
        return self._divide(gradient)

    def step_from_z(self, step: Tensor) -> Tensor:
        """``dz / sqrt(gamma)``, a step of z as a step of the weight; 0 where gamma is 0."""
        return self._divide(step)

    def _divide(self, x: Tensor) -> Tensor:
        for _, inverse, exponent in self.roots():
            x = x * inverse
            x = x if exponent is None else shift(x, -exponent)
        return x

    def inverse_root(self) -> Tensor | None:
        """``1 / sqrt(gamma)`` (0 where gamma is 0) for every entry, where it is stored and within range."""
        if self.whole is None or self.whole.exponent is not None:
            return None
        ((_, inverse, _),) = self.roots()
        return inverse

    def log2(self) -> Tensor:
        """log2(gamma) in fp64, exact at any depth; -inf on dead paths."""
        product = self.product()
        logarithm = product.mantissa.double().log2() * (2 / self.arithmetic.unit)
        if product.exponent is None:
            return logarithm
        return torch.where(product.mantissa > 0, logarithm + 2.0 * product.exponent, -math.inf)


def take_roots(gammas: Iterable[Gamma]) -> None:
    """:meth:`Gamma.roots` of all of these, in a few launches instead of a few for each."""
    plain = [
        gamma
        for gamma in gammas
        if gamma.whole is not None and gamma.whole.exponent is None and not gamma._kept
    ]
    if not plain or torch.is_grad_enabled() or plain[0].arithmetic.unit != 2:
        return
    products = [gamma.whole.mantissa for gamma in plain if gamma.whole is not None]
    roots = torch._foreach_sqrt(products)
    # 1 / root, and 0 for 0: the smallest normal number is below every root of a number.
    inverses = torch._foreach_maximum(roots, torch.finfo(products[0].dtype).tiny)
    torch._foreach_reciprocal_(inverses)
    torch._foreach_mul_(inverses, torch._foreach_sign(roots))
    for gamma, root, inverse in zip(plain, roots, inverses, strict=True):
        gamma._kept.append((root, inverse, None))


class Gammas(Mapping[str, Gamma]):
    """gamma of every parameter by name. Those that are not path-normalised have gamma = 1."""

    def __init__(self, gammas: dict[str, Gamma], exponents: bool) -> None:
        self._gammas = gammas
        self.exponents = exponents
        """Whether they needed exponents."""

    def __getitem__(self, name: str) -> Gamma:
        return self._gammas[name]

    def replaced(self, name: str, gamma: Gamma) -> Gammas:
        return Gammas({**self._gammas, name: gamma}, self.exponents)

    def __iter__(self) -> Iterator[str]:
        return iter(self._gammas)

    def __len__(self) -> int:
        return len(self._gammas)


LARGEST_P = 256
"""Beyond it the powers leave fp64, and phi_p is within a few percent of phi_inf."""


def check_p(p: object) -> float:
    """The order of the norm, checked."""
    if not isinstance(p, (int, float)) or not p >= 1:
        raise PathError(f"Invalid p: {p} (path norms need 1 <= p <= inf)")
    if LARGEST_P < p < math.inf:
        raise PathError(f"Invalid p: {p} (p over {LARGEST_P} is beyond floats; use math.inf)")
    return float(p)


@torch.no_grad()
def measure_gammas(
    graph: PathGraph,
    tensors: Tensors,
    p: float = 2,
    *,
    exponents: bool | None = None,
    shared: Shared = "kappa1",
) -> Gammas:
    """gamma of every parameter of a traced model, by one forward and one backward pass.

    ``exponents`` carries a power-of-two exponent per unit: exact at any depth and imbalance, slower.
    The default tries plain floats first and turns to exponents if anything came near their range.
    ``shared`` says how often a path counts that uses a weight more than once, see
    :mod:`pathsgd.geometry.shared_weights`.
    """
    check_shared(shared, check_p(p))
    flow = powered_network(graph, tensors, p)
    with full_precision(flow.device):
        found = None
        if not exponents:
            check = None if exponents is False else RangeCheck(flow)
            found = measure(flow, check)
            if check is not None and not check.passed():
                found = None
        if found is None:
            found = measure(powered_network(graph, tensors, p, exponents=True), None)
        for name, factor in sharing.factors(graph, tensors, p, shared).items():
            found = found.replaced(name, found[name].times(factor))
    return found


def gammas(
    model: nn.Module,
    example_input: Example | PathGraph | None = None,
    p: float = 2,
    *,
    shared: Shared = "kappa1",
) -> Gammas:
    """gamma_p of every parameter, the path scale that Path-SGD divides gradients by.

    ``gamma(u -> v) = (sum over paths through the edge of prod |other weights|^p)^(2/p)``. It is 0 on an edge
    that no live path uses, where the gradient is 0 too: take 0/0 as 0.

    Args:
        model: a module, or one that was wrapped by DistributedDataParallel or torch.compile.
        example_input: as in :func:`pathsgd.trace`; a PathGraph traced from the model saves tracing it again.
        p: the order of the norm, from 1 to ``math.inf``.
        shared: how a path counts that uses a weight k times: by k ("kappa1"), k^2 ("gram") or k (2k - 1)
            ("hessian"). They agree wherever no path uses a weight twice, convolutions included.

    Returns:
        A mapping from parameter names to :class:`Gamma`; gamma is 1 where nothing is path-normalised.

    Raises:
        TraceError: the model cannot be traced.
        PathError: p or shared is invalid, or the model is not the one the graph was traced from.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> _ = model[0].weight.data.fill_(3.0), model[2].weight.data.fill_(0.5)
        >>> found = gammas(model)
        >>> found["0.weight"].dense(), found["2.weight"].dense()
        (tensor([[0.2500, 0.2500]]), tensor([[18.]]))
    """
    graph = trace(model, example_input)
    return measure_gammas(graph, graph.tensors(model), p, shared=shared)


def measure(flow: PoweredNetwork, check: RangeCheck | None) -> Gammas:
    """Both passes, and gamma of every parameter as the backward pass meets its uses. A check is shown the
    numbers as they come."""
    needed = flow.needed()
    values: Values = {}
    for k, value in flow.forward():
        if k in needed:
            values[k] = value
        if check is not None:
            check.see(k, value, forward=True)
    value = None  # type: ignore[assignment]  # not kept alive by this name
    uses: dict[str, int] = {}
    for _, weight in flow.graph.weights():
        if weight.parameter is not None:
            uses[weight.parameter.name] = uses.get(weight.parameter.name, 0) + 1
    gammas: dict[str, Gamma] = {}
    sums = _sums_of_sources(flow.graph)
    flowed: dict[tuple[int, Shape], ExtendedFloat] = {}
    for k, gradient in flow.backward(values):
        if check is not None:
            check.see(k, gradient, forward=False)
        operation = flow.graph.nodes[k].operation
        if not isinstance(operation, Weighted) or operation.weight.parameter is None:
            continue
        info = flow.graph.parameters[operation.weight.parameter.name]
        if not info.normalised:
            continue
        factors = _factors(flow, values, gradient, k) if uses[info.name] == 1 else None
        if factors is not None:
            gammas[info.name] = Gamma(flow.arithmetic, info.shape, *factors)
            continue
        if k in sums:
            key = sums[k], operation.weight.shape
            if key not in flowed:
                flowed[key] = reduced_to(flow.arithmetic, gradient, operation.weight.shape)
            gradient = flowed[key]
        part = _adjoint_of(flow, values, gradient, k)
        before = gammas.get(info.name)
        whole = part if before is None else flow.arithmetic.add([before.product(), part])
        gammas[info.name] = Gamma(flow.arithmetic, info.shape, whole=whole)
    for name, info in flow.graph.parameters.items():
        if name not in gammas:
            gammas[name] = _constant(flow, info.shape, zero=info.normalised)
    return Gammas({name: gammas[name] for name in flow.graph.parameters}, flow.arithmetic.exponents)


def _factors(
    flow: PoweredNetwork, values: Values, gradient: ExtendedFloat, k: int
) -> tuple[ExtendedFloat, ExtendedFloat] | None:
    """(gamma_out, gamma_in) if this use is a plain linear layer at one position."""
    node = flow.graph.nodes[k]
    operation = node.operation
    if not isinstance(operation, Linear) or operation.weight.factors:
        return None
    parameter = operation.weight.parameter
    assert parameter is not None
    transposed = parameter.views == (Permute((1, 0)),)
    if math.prod(node.shape[:-1]) != 1 or (parameter.views and not transposed):
        return None
    into = _vector(values[node.inputs[0]])
    out = _vector(gradient)
    return (into, out) if transposed else (out, into)


def _vector(x: ExtendedFloat) -> ExtendedFloat:
    """The units of a value at one position."""
    return move(Reshape((x.mantissa.shape[-1],)), x)


def _sums_of_sources(graph: PathGraph) -> dict[int, int]:
    """The sum that a bias goes into, if nothing else reads the bias: what flows back to it is what flows back
    to every other bias there, as to the two of a batch norm."""
    readers: dict[int, list[int]] = {}
    for k, node in enumerate(graph.nodes):
        for source in node.inputs:
            readers.setdefault(source, []).append(k)
    return {
        k: readers[k][0]
        for k, node in enumerate(graph.nodes)
        if isinstance(node.operation, Source) and k not in graph.ends and len(readers.get(k, ())) == 1
        if isinstance(graph.nodes[readers[k][0]].operation, Add)
    }


def _adjoint_of(flow: PoweredNetwork, values: Values, gradient: ExtendedFloat, k: int) -> ExtendedFloat:
    """``dF/d|w|^p`` of a parameter through one of its uses, in the parameter's shape."""
    node = flow.graph.nodes[k]
    operation = node.operation
    arithmetic = flow.arithmetic
    match operation:
        case Linear(weight):
            per_edge = _linear_adjoint(arithmetic, values[node.inputs[0]], gradient)
        case Conv(weight):
            tensor = flow.weight(k)
            assert tensor is not None
            per_edge = weight_adjoint(arithmetic, operation, values[node.inputs[0]], gradient, tensor)
        case Scale(weight):
            per_edge = arithmetic.multiply(gradient, values[node.inputs[0]])
            per_edge = reduced_to(arithmetic, per_edge, weight.shape)
        case Source(weight):
            per_edge = reduced_to(arithmetic, gradient, weight.shape)
        case _:
            raise AssertionError(f"{operation} has no weights")
    return to_parameter(arithmetic, weight, per_edge, flow.factor(weight), flow.edges.tensors)


def _linear_adjoint(arithmetic: Arithmetic, x: ExtendedFloat, gradient: ExtendedFloat) -> ExtendedFloat:
    """``sum over positions of gamma_out(o) gamma_in(i)``."""
    lead = list(range(x.mantissa.dim() - 1))
    x, gradient = arithmetic.common(x, lead), arithmetic.common(gradient, lead)
    into = x.mantissa.reshape(-1, x.mantissa.shape[-1])
    out = gradient.mantissa.reshape(-1, gradient.mantissa.shape[-1])
    if math.isinf(arithmetic.p):
        value = into.new_zeros(out.shape[1], into.shape[1])
        for row, column in zip(out, into, strict=True):
            value = torch.maximum(value, torch.outer(row, column))
    else:
        value = out.t() @ into
    if x.exponent is None or gradient.exponent is None:
        return ExtendedFloat(value)
    head = gradient.exponent.expand(*(1,) * len(lead), out.shape[1]).reshape(-1, 1)
    tail = x.exponent.expand(*(1,) * len(lead), into.shape[1]).reshape(1, -1)
    return arithmetic.normalised(ExtendedFloat(value, (head + tail).clamp(min=DEAD)))


def _constant(flow: PoweredNetwork, shape: tuple[int, ...], zero: bool) -> Gamma:
    """gamma = 1 where nothing is normalised, 0 where no path leads on to an output."""
    one = flow.arithmetic.ones((1,) * len(shape), flow.device)
    if zero:
        exponent = None if one.exponent is None else torch.full_like(one.exponent, DEAD)
        one = ExtendedFloat(torch.zeros_like(one.mantissa), exponent)
    return Gamma(flow.arithmetic, shape, whole=move(Expand(shape), one))
