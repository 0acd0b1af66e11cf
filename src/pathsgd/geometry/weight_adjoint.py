"""``gamma_in gamma_out`` of a parameter through one of its uses: the derivative dF/d|w|^p of the powered
network."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from pathsgd.geometry.edge_weights import add_lists, multiply_pairs
from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat
from pathsgd.geometry.operations.apply import adjoint
from pathsgd.geometry.operations.contraction import linear_weight_adjoint
from pathsgd.geometry.operations.convolution import conv_weight_adjoint
from pathsgd.geometry.operations.extended_views import apply_view
from pathsgd.geometry.passes import PoweredNetwork, Values
from pathsgd.geometry.sharded import own_ends
from pathsgd.graph.nodes import Conv, Linear, Multiply, Permute, Reshape, Shape, Source, Weight
from pathsgd.graph.views import view_shape


def linear_ends(
    network: PoweredNetwork, gamma_in: Values, gamma_out: ExtendedFloat, k: int
) -> tuple[ExtendedFloat, ExtendedFloat] | None:
    """(gamma_out, gamma_in) as vectors if node k is a plain linear layer at one position."""
    node = network.graph.nodes[k]
    if not isinstance(node.operation, Linear) or node.operation.weight.factors:
        return None
    parameter = node.operation.weight.parameter
    assert parameter is not None
    transposed = parameter.views == (Permute((1, 0)),)
    if math.prod(node.shape[:-1]) != 1 or (parameter.views and not transposed):
        return None
    into, out = (
        apply_view(Reshape((x.mantissa.shape[-1],)), x) for x in (gamma_in[node.inputs[0]], gamma_out)
    )
    return (into, out) if transposed else (out, into)


def gamma_of_use(
    network: PoweredNetwork, gamma_in: Values, gamma_out: ExtendedFloat, k: int
) -> ExtendedFloat:
    """``gamma_in gamma_out`` of a parameter through one of its uses, in the parameter's shape."""
    node, arithmetic = network.graph.nodes[k], network.arithmetic
    match node.operation:
        case Linear(weight):
            out, into = own_ends(network.edges.signed(k), gamma_out, gamma_in[node.inputs[0]], -1)
            per_edge = linear_weight_adjoint(arithmetic, into, out)
        case Conv(weight):
            per_edge = conv_weight_adjoint(
                arithmetic, node.operation, gamma_in[node.inputs[0]], gamma_out, network.edges.signed(k)
            )
        case Multiply(weight):
            per_edge = arithmetic.multiply(gamma_out, gamma_in[node.inputs[0]])
            per_edge = sum_to(arithmetic, per_edge, weight.shape)
        case Source(weight):
            per_edge = sum_to(arithmetic, gamma_out, weight.shape)
        case _:
            raise AssertionError(f"{node.operation} has no weights")
    assert weight.parameter is not None
    shape = network.graph.parameters[weight.parameter.name].shape
    return _to_parameter(arithmetic, weight, per_edge, network.edges.factor_power(k), shape)


def gammas_of_norms(network: PoweredNetwork, by_channel: Mapping[int, Tensor]) -> dict[str, ExtendedFloat]:
    """Of the parameters of batch norms that are computed as one, from the sums over places of their scales
    and shifts: all in a few launches."""
    weights = {k: network.graph.nodes[k].operation.weight for k in by_channel}  # type: ignore[union-attr]
    factors = [network.edges.factor_power(k) for k in by_channel]
    products = multiply_pairs(list(by_channel.values()), [f if f is None else f.mantissa for f in factors])
    found: dict[str, list[Tensor]] = {}
    for weight, product in zip(weights.values(), products, strict=True):
        assert product is not None
        assert weight.parameter is not None
        shape = network.graph.parameters[weight.parameter.name].shape
        own = _to_parameter(network.arithmetic, weight, ExtendedFloat(product), None, shape)
        found.setdefault(weight.parameter.name, []).append(own.mantissa)
    return dict(zip(found, map(ExtendedFloat, add_lists(list(found.values()))), strict=True))


def _to_parameter(
    arithmetic: Arithmetic,
    weight: Weight,
    per_edge: ExtendedFloat,
    factor: ExtendedFloat | None,
    shape: Shape,
) -> ExtendedFloat:
    """``dF/d|w|^p`` of the parameter, of that shape, from that of the edges: through factors, broadcasting
    and views."""
    assert weight.parameter is not None
    if factor is not None or weight.parameter.views or weight.parameter.shape != per_edge.mantissa.shape:
        per_edge = arithmetic.normalise_deferred(per_edge)
    if factor is not None:
        per_edge = arithmetic.multiply(per_edge, factor)
    per_edge = sum_to(arithmetic, per_edge, weight.parameter.shape)
    shapes = [shape]
    for view in weight.parameter.views:
        shapes.append(view_shape(view, shapes[-1]))
    for view, before in zip(reversed(weight.parameter.views), reversed(shapes[:-1]), strict=True):
        (per_edge,) = adjoint(arithmetic, view, per_edge, None, [before])
    return per_edge


def sum_to(arithmetic: Arithmetic, x: ExtendedFloat, shape: Shape) -> ExtendedFloat:
    """The adjoint of broadcasting ``shape`` to the shape of ``x``."""
    extra = x.mantissa.dim() - len(shape)
    padded = (1,) * extra + tuple(shape)
    dims = [d for d, n in enumerate(padded) if n == 1 and x.mantissa.shape[d] != 1]
    if dims:
        x = arithmetic.reduce(x, dims)
    return apply_view(Reshape(tuple(shape)), x) if extra else x
