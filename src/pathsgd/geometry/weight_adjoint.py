"""``gamma_in gamma_out`` of a parameter through one of its uses: the derivative dF/d|w|^p of the powered
network."""

from __future__ import annotations

import math

from pathsgd.geometry.operations.apply import adjoint
from pathsgd.geometry.operations.contraction import adjoin_linear_weight
from pathsgd.geometry.operations.convolution import adjoin_conv_weight
from pathsgd.geometry.passes import PoweredNetwork, Values
from pathsgd.geometry.scaled import Scaled, apply_view
from pathsgd.geometry.sharded import take_held_ends
from pathsgd.graph.nodes import Conv, Linear, Multiply, Permute, Reshape, Source
from pathsgd.graph.views import view_shape


def find_ends(
    network: PoweredNetwork, gamma_in: Values, gamma_out: Scaled, k: int
) -> tuple[Scaled, Scaled] | None:
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


def adjoin_use(network: PoweredNetwork, gamma_in: Values, gamma_out: Scaled, k: int) -> Scaled:
    """``gamma_in gamma_out`` of a parameter through its use in node k, in the parameter's shape."""
    node, arithmetic = network.graph.nodes[k], network.arithmetic
    signed = network.weight(k)
    assert signed is not None
    match node.operation:
        case Linear(weight):
            out, into = take_held_ends(signed, gamma_out, gamma_in[node.inputs[0]], -1)
            per_edge = adjoin_linear_weight(arithmetic, into, out)
        case Conv(weight):
            per_edge = adjoin_conv_weight(
                arithmetic, node.operation, gamma_in[node.inputs[0]], gamma_out, signed
            )
        case Multiply(weight):
            per_edge = arithmetic.multiply(gamma_out, gamma_in[node.inputs[0]])
            per_edge = arithmetic.sum_to(per_edge, weight.shape)
        case Source(weight):
            per_edge = arithmetic.sum_to(gamma_out, weight.shape)
        case _:
            raise AssertionError(f"{node.operation} has no weights")
    # From the edges to the parameter: through factors, broadcasting and views.
    assert weight.parameter is not None
    factor = network.factor_power(k)
    if factor is not None:
        per_edge = arithmetic.multiply(per_edge, factor)
    per_edge = arithmetic.sum_to(per_edge, weight.parameter.shape)
    shapes = [network.graph.parameters[weight.parameter.name].shape]
    for view in weight.parameter.views:
        shapes.append(view_shape(view, shapes[-1]))
    for view, before in zip(reversed(weight.parameter.views), reversed(shapes[:-1]), strict=True):
        (per_edge,) = adjoint(arithmetic, view, per_edge, None, [before])
    return per_edge
