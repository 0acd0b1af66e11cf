"""gamma, the path scale of every weight: gamma(u -> v) = (gamma_in(u) gamma_out(v))^(2/p) (Algorithm 1)."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pathsgd._torch import are_plain
from pathsgd.errors import check_p
from pathsgd.geometry.operations.contraction import adjoin_linear_weight
from pathsgd.geometry.passes import PoweredNetwork, check_range, is_in_range
from pathsgd.geometry.scaled import DEAD, Arithmetic, Scaled, find_middle, scale_by_power
from pathsgd.geometry.sharded import gather_vectors, take_held_ends
from pathsgd.geometry.weight_adjoint import adjoin_use, find_ends
from pathsgd.graph.edge_weights import Tensors
from pathsgd.graph.nodes import Weighted
from pathsgd.graph.path_graph import PathGraph
from pathsgd.graph.structure import ParameterStatus
from pathsgd.graph.trace import Example, trace
from pathsgd.sharding import local_part, place_like, shards_of


@dataclass(frozen=True)
class Gamma:
    """gamma of one parameter: takes a weight w to its invariant coordinate ``z = w sqrt(gamma)`` and back.

    Neither z nor its gradient ``h = g / sqrt(gamma)`` changes when units are rescaled. Of a sharded parameter
    (DTensor) it is gamma of the part that this rank holds. It is computed in fp64.

    Attributes:
        arithmetic: the order p.
        shape: that of the parameter, or of the part of it.
        factors: sums over paths whose product, broadcast, is that of every entry, before the power 2/p. Where
            the parameter is the matrix of one linear layer, gamma_out of its rows and gamma_in of its
            columns: then no matrix is stored. Elsewhere one.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> _ = model[0].weight.data.fill_(3.0), model[2].weight.data.fill_(0.5)
        >>> gamma = gammas(model)["0.weight"]
        >>> gamma.dense().tolist(), gamma.log2().tolist()
        ([[0.25, 0.25]], [[-2.0, -2.0]])
        >>> gamma.weight_to_z(model[0].weight.detach())
        tensor([[1.5000, 1.5000]])
    """

    arithmetic: Arithmetic
    shape: tuple[int, ...]
    factors: tuple[Scaled, ...]

    def find_roots(self) -> tuple[list[Tensor], Tensor]:
        """sqrt(gamma) in parts.

        Returns:
            Factors that broadcast, and the power of two by which their product is to be multiplied.
        """
        exponents = [factor.exponent for factor in self.factors]
        exponent = functools.reduce(torch.add, exponents)
        roots = [self.arithmetic.root(factor.mantissa) for factor in self.factors]
        return roots, torch.where(exponent <= DEAD, 0.0, exponent)

    def part(self, tensor: Tensor) -> Gamma:
        """The gamma of what this rank holds of a sharded parameter.

        Args:
            tensor: the parameter.

        Returns:
            The new gamma.
        """
        parts = [factor.mantissa for factor in self.factors]
        for shard in shards_of(tensor):
            parts = [shard.of(m, shard.dim) if m.shape[shard.dim] == shard.size else m for m in parts]
        factors = (Scaled(m.clone(), f.exponent) for m, f in zip(parts, self.factors, strict=True))
        return Gamma(self.arithmetic, tuple(local_part(tensor).shape), tuple(factors))

    def dense(self) -> Tensor:
        """gamma of every entry.

        Returns:
            An fp64 tensor of the parameter's shape. It may over- or underflow where :meth:`log2` does not.
        """
        roots, exponent = self.find_roots()
        product = functools.reduce(torch.mul, [factor.mantissa for factor in self.factors])
        root = functools.reduce(torch.mul, roots)
        gamma = product if self.arithmetic.order == 2 else root * root
        return scale_by_power(gamma, 2 * exponent)

    def log2(self) -> Tensor:
        """The binary logarithm of gamma, exact at any depth.

        Returns:
            An fp64 tensor of the parameter's shape, -inf on dead paths.
        """
        roots, exponent = self.find_roots()
        logarithms = [2 * root.log2() for root in roots]
        return functools.reduce(torch.add, logarithms) + 2 * exponent

    def weight_to_z(self, weight: Tensor) -> Tensor:
        """A weight in invariant coordinates.

        Args:
            weight: a tensor of the parameter's shape.

        Returns:
            ``z = w sqrt(gamma)``, in fp32 or fp64.
        """
        roots, exponent = self.find_roots()
        return self._multiply(weight, roots, exponent)

    def gradient_to_z(self, gradient: Tensor) -> Tensor:
        """The gradient with respect to z.

        Args:
            gradient: a tensor of the parameter's shape.

        Returns:
            ``h = g / sqrt(gamma)``, 0 where gamma is 0, in fp32 or fp64.
        """
        roots, exponent = self.find_roots()
        inverses = [torch.where(root > 0, 1 / root, 0) for root in roots]
        return self._multiply(gradient, inverses, -exponent)

    def step_from_z(self, step: Tensor) -> Tensor:
        """A step of z as a step of the weight.

        Args:
            step: a tensor of the parameter's shape.

        Returns:
            ``dw = dz / sqrt(gamma)``, 0 where gamma is 0.
        """
        return self.gradient_to_z(step)  # the same division

    def _multiply(self, tensor: Tensor, factors: list[Tensor], exponent: Tensor) -> Tensor:
        """The product, one factor after the other: together they may be out of range. In fp32, unless the
        tensor is in fp64; factors with exponents are brought near 1 before, by powers of two, which change no
        bit."""
        x = local_part(tensor)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.arithmetic.centered:
            middle = find_middle(factors[-1]) if len(factors) > 1 else torch.zeros_like(exponent)
            first, *others = factors
            factors = [
                scale_by_power(first, exponent + middle),
                *(scale_by_power(f, -middle) for f in others),
            ]
        first, *others = [f.to(dtype) for f in factors]
        product = x.to(dtype) * first
        in_place = are_plain([x])
        for factor in others:
            product = product.mul_(factor) if in_place else product * factor
        return place_like(product, tensor)


class Gammas(dict[str, Gamma]):
    """gamma of every parameter by name, 1 for those that are on no path.

    Of a parameter that is alone on its paths it is a constant, the number of places it is used at (times
    fixed factors, such as those of average pooling); optimizers take 1 there.

    Args:
        gammas: by the names of the parameters.
        centered: whether fp64 alone was not enough, so that exponents were needed.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> list(gammas(model))
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    def __init__(self, gammas: dict[str, Gamma], centered: bool) -> None:
        super().__init__(gammas)
        self.centered = centered


def gammas(model: nn.Module, example_input: Example | PathGraph | None = None, p: float = 2) -> Gammas:
    """gamma_p of every parameter, the path scale that Path-SGD divides gradients by.

    ``gamma(u -> v) = (sum over paths through the edge of prod |other weights|^p)^(2/p)``. It is 0 on an edge
    that no live path uses, where the gradient is 0 too: take 0/0 as 0. A path that uses a weight k times, as
    in recurrent and tied layers, counts k times. Batch norms enter by their running statistics; in the steps
    of optimizers paths end there.

    Args:
        model: the module to measure; wrappers of torch (DistributedDataParallel, torch.compile) are looked
            through.
        example_input: as in :func:`pathsgd.trace`, or a PathGraph traced from the model.
        p: the order of the norm, from 1 to ``math.inf``.

    Returns:
        A mapping from parameter names to :class:`Gamma`.

    Raises:
        TraceError: the model cannot be traced.
        PathError: p is invalid, the graph is of another model, or path weights are out of the range of fp64.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> _ = model[0].weight.data.fill_(3.0), model[2].weight.data.fill_(0.5)
        >>> found = gammas(model)
        >>> found["0.weight"].dense().tolist(), found["2.weight"].dense().tolist()
        ([[0.25, 0.25]], [[18.0]])
    """
    graph = trace(model, example_input)
    return measure_gammas(graph, graph.tensors(model, sharded=True), p)


@torch.no_grad()
def measure_gammas(
    graph: PathGraph, tensors: Tensors, p: float = 2, *, centered: bool | None = None
) -> Gammas:
    """gamma of every parameter of a traced model, of what this rank holds if it is sharded.

    Args:
        graph: of the model.
        tensors: of the model, by name.
        p: the order of the norm.
        centered: whether numbers have exponents. By default fp64 alone is tried first; then all of them are
            looked at, for which the host waits for a GPU.
    """
    check_p(p)
    kept = gather_vectors(graph, tensors)
    looks = centered is None
    network = PoweredNetwork(graph.folded.graph, kept, Arithmetic(float(p), bool(centered)), looks)
    measured = measure(network)
    if looks and not is_in_range(network):
        network = PoweredNetwork(graph.folded.graph, kept, Arithmetic(float(p)), looks)
        measured = measure(network)
        check_range(network, network.find_multiplied(), backward=True)
    parts = {
        name: gamma if kept[name] is tensors[name] else gamma.part(tensors[name])
        for name, gamma in measured.items()
    }
    return Gammas(parts, network.arithmetic.centered)


def measure(network: PoweredNetwork) -> dict[str, Gamma]:
    """Both passes, and gamma of every parameter as the backward pass meets its uses."""
    graph, arithmetic, tensors = network.graph, network.arithmetic, network.tensors
    shapes = {name: tuple(local_part(tensors[name]).shape) for name in graph.parameters}
    gamma_in = network.forward(network.find_multiplied())
    uses = Counter(weight.parameter.name for _, weight in graph.weights() if weight.parameter is not None)
    vectors: dict[str, list[tuple[Scaled, Scaled]]] = {}
    wholes: dict[str, list[Scaled]] = {}
    for k, gamma_out in network.backward(gamma_in):
        operation = graph.nodes[k].operation
        if not isinstance(operation, Weighted) or operation.weight.parameter is None:
            continue
        info = graph.parameters[operation.weight.parameter.name]
        if info.status is ParameterStatus.OUTSIDE or 0 in shapes[info.name]:
            continue
        ends = find_ends(network, gamma_in, gamma_out, k)
        if ends is None:
            wholes.setdefault(info.name, []).append(adjoin_use(network, gamma_in, gamma_out, k))
        else:
            vectors.setdefault(info.name, []).append(take_held_ends(tensors[info.name], *ends, 0))
    for name in [name for name in vectors if uses[name] > 1]:
        products = [adjoin_linear_weight(arithmetic, into, out) for out, into in vectors.pop(name)]
        wholes.setdefault(name, []).append(arithmetic.add(products))
    factors: dict[str, tuple[Scaled, ...]] = {name: (arithmetic.add(ws),) for name, ws in wholes.items()}
    for name, ((out, into),) in vectors.items():
        rows, columns = out.mantissa[:, None], into.mantissa[None]
        factors[name] = Scaled(rows, out.exponent), Scaled(columns, into.exponent)
    for name, info in graph.parameters.items():
        if name not in factors:
            # 1 of what is on no path, 0 where no path leads on to an output.
            whole = arithmetic.ones(shapes[name], network.device)
            if info.status in (ParameterStatus.NORMALISED, ParameterStatus.ALONE):
                whole = Scaled(torch.zeros_like(whole.mantissa), torch.full_like(whole.exponent, DEAD))
            factors[name] = (whole,)
    return {name: Gamma(arithmetic, shapes[name], factors[name]) for name in graph.parameters}
