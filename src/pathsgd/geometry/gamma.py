"""gamma, the path scale of every weight: gamma(u -> v) = (gamma_in(u) gamma_out(v))^(2/p) (Algorithm 1)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pathsgd._torch import are_plain, foreach, is_forward_mode
from pathsgd.errors import PathError
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.extended_float import DEAD, Arithmetic, ExtendedFloat, exact_ldexp
from pathsgd.geometry.operations.contraction import add_outer_products
from pathsgd.geometry.operations.extended_views import apply_view
from pathsgd.geometry.passes import PoweredNetwork
from pathsgd.geometry.precision import full_precision
from pathsgd.geometry.range_check import RangeCheck, measure_in_range, run_forward
from pathsgd.geometry.sharded import gather_vectors, local_part, own_ends, place_like, shards_of
from pathsgd.geometry.shared_weights import Shared, check_shared, shared_corrections
from pathsgd.geometry.weight_adjoint import gamma_of_use, gammas_of_norms, linear_ends, sum_to
from pathsgd.graph.nodes import Expand, Reshape, Shape, Weighted
from pathsgd.graph.path_graph import ParameterStatus, PathGraph
from pathsgd.graph.path_lengths import biased_sums
from pathsgd.graph.sharded import is_sharded
from pathsgd.graph.trace import Example, trace


@dataclass(frozen=True)
class Gamma:
    """gamma of one parameter: takes a weight w to its invariant coordinate ``z = w sqrt(gamma)`` and back.

    Neither z nor its gradient ``h = g / sqrt(gamma)`` changes when units are rescaled. Of a sharded parameter
    (DTensor) it is gamma of the part that this rank holds.

    Attributes:
        arithmetic: the order p and the dtype in which gamma is computed.
        shape: that of the parameter, or of the part of it.
        gamma_out: the sum over paths onward, one number per row, where the parameter is the matrix of one
            linear layer: then no matrix is stored.
        gamma_in: likewise over the paths that arrive, one number per column.
        whole: elsewhere, the product of both for every entry. All three are before the power 2/p.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> _ = model[0].weight.data.fill_(3.0), model[2].weight.data.fill_(0.5)
        >>> gamma = gammas(model)["0.weight"]
        >>> gamma.dense(), gamma.log2()
        (tensor([[0.2500, 0.2500]]), tensor([[-2., -2.]], dtype=torch.float64))
        >>> gamma.weight_to_z(model[0].weight.detach())
        tensor([[1.5000, 1.5000]])
    """

    arithmetic: Arithmetic
    shape: tuple[int, ...]
    gamma_out: ExtendedFloat | None = None
    gamma_in: ExtendedFloat | None = None
    whole: ExtendedFloat | None = None
    _roots: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """What gamma is computed in."""
        return self.arithmetic.dtype

    def factors(self) -> list[ExtendedFloat]:
        """Sums over paths whose product, broadcast, is that of every entry.

        Returns:
            One or two of them, before the power 2/p.
        """
        if self.whole is not None:
            return [self.whole]
        assert self.gamma_out is not None
        assert self.gamma_in is not None
        return [apply_view(Reshape((-1, 1)), self.gamma_out), apply_view(Reshape((1, -1)), self.gamma_in)]

    def product(self) -> ExtendedFloat:
        """The sum over paths of every entry, before the power 2/p.

        Returns:
            ``gamma_in gamma_out``.
        """
        first, *rest = self.factors()
        for other in rest:
            exponent = None
            if first.exponent is not None and other.exponent is not None:
                exponent = (first.exponent + other.exponent).clamp(min=DEAD)
            first = ExtendedFloat(first.mantissa * other.mantissa, exponent)
        return first

    def times(self, factor: Tensor) -> Gamma:
        """This gamma with the sum over paths multiplied, entry by entry.

        Args:
            factor: a tensor of the parameter's shape.

        Returns:
            The new gamma.
        """
        product = self.product()
        whole = ExtendedFloat(product.mantissa * factor.to(product.mantissa.dtype), product.exponent)
        return Gamma(self.arithmetic, self.shape, whole=whole)

    def part(self, tensor: Tensor) -> Gamma:
        """The gamma of what this rank holds of a sharded parameter.

        Args:
            tensor: the parameter.

        Returns:
            The new gamma.
        """
        shards = shards_of(tensor)
        if not shards:
            return self
        shape = tuple(local_part(tensor).shape)
        if self.whole is not None:
            whole = self.whole
            for shard in shards:
                whole = shard.of(whole, shard.dim)
            mantissa, exponent = whole
            return Gamma(self.arithmetic, shape, whole=ExtendedFloat(mantissa.clone(), exponent))
        assert self.gamma_out is not None
        assert self.gamma_in is not None
        return Gamma(self.arithmetic, shape, *own_ends(tensor, self.gamma_out, self.gamma_in, 0))

    def dense(self) -> Tensor:
        """gamma of every entry.

        Returns:
            A tensor of the parameter's shape. It may over- or underflow where :meth:`log2` does not.
        """
        product = self.product()
        gamma = self.arithmetic.root(product.mantissa, 2)
        return gamma if product.exponent is None else exact_ldexp(gamma, 2 * product.exponent)

    def log2(self) -> Tensor:
        """The binary logarithm of gamma, exact at any depth.

        Returns:
            An fp64 tensor of the parameter's shape, -inf on dead paths.
        """
        product = self.product()
        logarithm = product.mantissa.double().log2() * (2 / self.arithmetic.order)
        if product.exponent is None:
            return logarithm
        return torch.where(product.mantissa > 0, logarithm + 2.0 * product.exponent, -math.inf)

    def roots(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """sqrt(gamma) = (gamma_in gamma_out)^(1/p) as factors that broadcast.

        Returns:
            For each factor its root, 1 / root (0 where it is 0) and its exponent, if it has one.
        """
        if not self._roots:
            for factor in self.factors():
                root = self.arithmetic.root(factor.mantissa)
                self._roots.append((root, _invert(root), factor.exponent))
        return self._roots

    @property
    def stored(self) -> bool:
        """Whether gamma of every entry is, and not two vectors whose product it is."""
        return self.whole is not None

    def inverse_root(self) -> tuple[Tensor, Tensor | None]:
        """``1 / sqrt(gamma)`` of every entry, 0 where gamma is 0.

        Returns:
            (root, n) for ``root * 2^-n``, n None for 0; n is 0 where the root is.
        """
        (_, inverse, exponent), *rest = self.roots()
        for _, other, shift in rest:
            inverse = inverse * other
            exponent = exponent if exponent is None or shift is None else exponent + shift
        return inverse, exponent if exponent is None else torch.where(inverse == 0, 0, exponent)

    def weight_to_z(self, weight: Tensor) -> Tensor:
        """A weight in invariant coordinates.

        Args:
            weight: a tensor of the parameter's shape, in fp32 or fp64.

        Returns:
            ``z = w sqrt(gamma)``.
        """
        found = self.roots()
        z = _multiply(local_part(weight), [root for root, _, _ in found])
        for _, _, exponent in found:
            z = z if exponent is None else exact_ldexp(z, exponent)
        return place_like(z, weight)

    def gradient_to_z(self, gradient: Tensor) -> Tensor:
        """The gradient with respect to z.

        Args:
            gradient: a tensor of the parameter's shape, in fp32 or fp64.

        Returns:
            ``h = g / sqrt(gamma)``, 0 where gamma is 0.
        """
        found = self.roots()
        h = _multiply(local_part(gradient), [inverse for _, inverse, _ in found])
        for _, _, exponent in found:
            h = h if exponent is None else exact_ldexp(h, -exponent)
        return place_like(h, gradient)

    def step_from_z(self, step: Tensor) -> Tensor:
        """A step of z as a step of the weight.

        Args:
            step: a tensor of the parameter's shape, in fp32 or fp64.

        Returns:
            ``dw = dz / sqrt(gamma)``, 0 where gamma is 0.
        """
        return self.gradient_to_z(step)  # the same division


def _multiply(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """A new tensor: in the memory of the product of two factors, unless it is differentiated."""
    product, *rest = factors
    for other in rest:
        product = product * other
    in_place = bool(rest) and x.dtype == product.dtype and are_plain([x, product])
    return product.mul_(x) if in_place else x * product


def _invert(root: Tensor) -> Tensor:
    """1 / root, and 0 for 0."""
    if torch.is_grad_enabled() or is_forward_mode():
        return torch.where(root > 0, 1 / root, 0)
    # On a CPU in a fifth of the time.
    return root.reciprocal().nan_to_num_(nan=math.nan, posinf=0.0)


def take_roots(gammas: Iterable[Gamma]) -> None:
    """:meth:`Gamma.roots` of all of these on a GPU, in a few launches instead of a few for each."""
    plain = [
        (gamma, factor.mantissa)
        for gamma in gammas
        if gamma.arithmetic.order == 2 and not gamma.arithmetic.exponents and not gamma._roots
        for factor in gamma.factors()
        if factor.mantissa.is_cuda
    ]
    if not plain or torch.is_grad_enabled():
        return
    products = [product for _, product in plain]
    roots = foreach("sqrt", products)
    # 1 / root, and 0 for 0: the smallest normal number is below every root of a number.
    inverses = foreach("maximum", roots, torch.finfo(products[0].dtype).tiny)
    foreach("reciprocal_", inverses)
    foreach("mul_", inverses, foreach("sign", roots))
    for (gamma, _), root, inverse in zip(plain, roots, inverses, strict=True):
        gamma._roots.append((root, inverse, None))


class Gammas(Mapping[str, Gamma]):
    """gamma of every parameter by name, 1 for those that are on no path.

    Of a parameter that is alone on its paths it is a constant, the number of places it is used at (times
    fixed factors, such as those of average pooling); optimizers take 1 there.

    Args:
        gammas: by the names of the parameters.
        exponents: whether plain floats were not enough, so that every unit carries an exponent.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> found = gammas(model)
        >>> list(found), found.exponents
        (['0.weight', '0.bias', '2.weight', '2.bias'], False)
    """

    def __init__(self, gammas: dict[str, Gamma], exponents: bool) -> None:
        self._gammas = gammas
        self.exponents = exponents

    def __getitem__(self, name: str) -> Gamma:
        return self._gammas[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._gammas)

    def forget_roots(self) -> None:
        """To be called when the tensors of the gammas are written in place."""
        for gamma in self._gammas.values():
            gamma._roots.clear()

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
        model: the module to measure; wrappers of torch (DistributedDataParallel, torch.compile) are looked
            through.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        p: the order of the norm, from 1 to ``math.inf``.
        shared: how a path counts that uses a weight k times: by k ("kappa1"), k^2 ("gram") or k (2k - 1)
            ("hessian"). They agree wherever no path uses a weight twice, convolutions included.

    Returns:
        A mapping from parameter names to :class:`Gamma`.

    Raises:
        TraceError: the model cannot be traced.
        PathError: p or shared is invalid, or the graph is of another model.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> _ = model[0].weight.data.fill_(3.0), model[2].weight.data.fill_(0.5)
        >>> found = gammas(model)
        >>> found["0.weight"].dense(), found["2.weight"].dense()
        (tensor([[0.2500, 0.2500]]), tensor([[18.]]))
    """
    graph = trace(model, example_input)
    return measure_gammas(graph, graph.tensors(model, sharded=True), p, shared=shared)


@torch.no_grad()
def measure_gammas(
    graph: PathGraph,
    tensors: Tensors,
    p: float = 2,
    *,
    exponents: bool | None = None,
    shared: Shared = "kappa1",
) -> Gammas:
    """gamma of every parameter of a traced model; ``exponents`` as in
    :func:`pathsgd.geometry.range_check.measure_in_range`."""
    check_shared(shared, check_p(p))
    if any(map(is_sharded, tensors.values())):
        return _measure_sharded(graph, tensors, p, exponents, shared)
    found = measure_in_range(graph, tensors, p, measure, exponents)
    with full_precision(next(iter(tensors.values())).device):
        corrections = shared_corrections(graph, tensors, p, shared)
    if not corrections:
        return found
    corrected = {n: g.times(corrections[n]) if n in corrections else g for n, g in found.items()}
    return Gammas(corrected, found.exponents)


def _measure_sharded(
    graph: PathGraph, tensors: Tensors, p: float, exponents: bool | None, shared: Shared
) -> Gammas:
    """gamma of what this rank holds of every parameter. A collective call."""
    if shared != "kappa1":
        raise PathError(f"shared={shared!r} is not supported with sharded parameters; use 'kappa1'")
    kept = gather_vectors(graph, tensors)
    found = measure_in_range(graph, kept, p, measure, exponents)
    whole = {name for name in found if is_sharded(tensors[name]) and not is_sharded(kept[name])}
    return Gammas(
        {name: gamma.part(tensors[name]) if name in whole else gamma for name, gamma in found.items()},
        found.exponents,
    )


def measure(network: PoweredNetwork, check: RangeCheck | None) -> Gammas:
    """Both passes, and gamma of every parameter as the backward pass meets its uses. ``check`` is shown the
    numbers as they come."""
    network = network.join_norms()
    inside_norms = network.inside_norms
    graph, arithmetic, tensors = network.graph, network.arithmetic, network.edges.tensors
    shapes = {name: tuple(local_part(tensors[name]).shape) for name in graph.parameters}
    gamma_in = run_forward(network, check)
    uses = Counter(weight.parameter.name for _, weight in graph.weights() if weight.parameter is not None)
    # gamma_out is the same for every bias of one sum, as for the two of a batch norm.
    sums = biased_sums(graph.nodes, graph.ends)
    summed: dict[tuple[int, Shape], ExtendedFloat] = {}
    vectors: dict[str, list[tuple[ExtendedFloat, ExtendedFloat]]] = {}
    wholes: dict[str, ExtendedFloat] = {}
    by_channel: dict[int, Tensor] = {}
    arrived: ExtendedFloat
    normal = arithmetic.normalise_deferred

    def add(*values: ExtendedFloat) -> ExtendedFloat:
        return arithmetic.add([normal(value) for value in values])

    for k, gamma_out in network.backward(gamma_in):
        inside = k in inside_norms
        if not inside:
            arrived = gamma_out  # at a norm, too, before what is inside of it
        if check is not None:
            check.see(k, arrived, forward=False)
        operation = graph.nodes[k].operation
        if not isinstance(operation, Weighted) or operation.weight.parameter is None:
            continue
        info = graph.parameters[operation.weight.parameter.name]
        if info.status is ParameterStatus.OUTSIDE or 0 in shapes[info.name]:
            continue
        if inside:
            by_channel[k] = gamma_out.mantissa
            continue
        ends = linear_ends(network, gamma_in, gamma_out, k)
        if ends is not None:
            vectors.setdefault(info.name, []).append(own_ends(tensors[info.name], *ends, 0))
            continue
        if k in sums:
            key = sums[k], operation.weight.shape
            if key not in summed:
                summed[key] = sum_to(arithmetic, gamma_out, operation.weight.shape)
            gamma_out = summed[key]
        whole = gamma_of_use(network, gamma_in, gamma_out, k)
        wholes[info.name] = add(wholes[info.name], whole) if info.name in wholes else whole
    for name, whole in gammas_of_norms(network, by_channel).items() if by_channel else ():
        wholes[name] = add(wholes[name], whole) if name in wholes else whole
    for name in [name for name in vectors if uses[name] > 1]:
        product = add_outer_products(arithmetic, vectors.pop(name))
        wholes[name] = add(wholes[name], product) if name in wholes else product
    gammas = {
        name: Gamma(arithmetic, shapes[name], normal(out), normal(into))
        for name, ((out, into),) in vectors.items()
    }
    gammas |= {name: Gamma(arithmetic, shapes[name], whole=normal(whole)) for name, whole in wholes.items()}
    for name, info in graph.parameters.items():
        if name not in gammas:
            on_paths = info.status in (ParameterStatus.NORMALISED, ParameterStatus.ALONE)
            gammas[name] = _constant(network, shapes[name], zero=on_paths)
    return Gammas({name: gammas[name] for name in graph.parameters}, arithmetic.exponents)


def _constant(network: PoweredNetwork, shape: Shape, zero: bool) -> Gamma:
    """gamma = 1 of what is on no path, 0 where no path leads on to an output."""
    one = network.arithmetic.ones((1,) * len(shape), network.device)
    if zero:
        exponent = None if one.exponent is None else torch.full_like(one.exponent, DEAD)
        one = ExtendedFloat(torch.zeros_like(one.mantissa), exponent)
    return Gamma(network.arithmetic, shape, whole=apply_view(Expand(shape), one))
