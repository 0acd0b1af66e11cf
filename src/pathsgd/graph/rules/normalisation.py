"""Normalisation layers. Batch norm with running statistics is three edges; the others end the region
and their affine part opens the next one."""

from __future__ import annotations

from dataclasses import replace

from pathsgd.graph.builder import Builder, Ends, Paths, Unknown, V, Value
from pathsgd.graph.nodes import Stored, Weight, number
from pathsgd.graph.rules.registry import Call, rule


@rule("batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
      "native_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update",
      "cudnn_batch_norm")  # fmt: skip
def batch_norm(b: Builder, call: Call) -> list[Value]:
    x: Paths = call.paths("input")
    mean, variance = call.get("running_mean"), call.get("running_var")
    if not (isinstance(mean, Weight) and isinstance(variance, Weight)):
        return [_ends(b, call, x, "batch norm without running statistics", channel=1)]
    eps = call.get("eps", "epsilon", default=1e-5)
    sigma = _only_factor(variance)
    inverse_sigma = replace(sigma, inverse_sigma=eps)
    weight, bias = call.get("weight"), call.get("bias")
    if isinstance(weight, (Paths, Unknown)):
        raise Ends("batch norm with a computed weight")
    gain = weight if isinstance(weight, Weight) else None

    def edge(*factors: Stored) -> Weight:
        parameter = gain.parameter if gain is not None else None
        fixed = gain.factors if gain is not None else ()
        flat = Weight(mean.shape, parameter, (*fixed, *factors), "norm weight")
        return _lay_along(b, flat, len(b.shape(x)), channel=1)

    parts: list[Value] = [
        b.multiply(x, edge(inverse_sigma)),
        edge(inverse_sigma, _only_factor(mean), *number(-1).factors),
    ]
    if bias is not None:
        bias = bias.as_role("norm bias") if isinstance(bias, Weight) else bias
        parts.append(_lay_along(b, bias, len(b.shape(x)), channel=1))
    return [b.add(parts)]


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(b: Builder, call: Call) -> list[Value]:
    return [_ends(b, call, call.paths("input"), f"{call.name} is not positively homogeneous")]


@rule("group_norm", "native_group_norm", "instance_norm")
def group_norm(b: Builder, call: Call) -> list[Value]:
    reason = f"{call.name} is not positively homogeneous"
    return [_ends(b, call, call.paths("input"), reason, channel=1)]


def _ends(b: Builder, call: Call, x: Paths, reason: str, channel: int | None = None) -> Paths:
    b.end(x, reason)
    y = b.begin(call.shape, call.name)
    ndim = len(call.shape)
    weight, bias = call.get("weight"), call.get("bias")
    if isinstance(weight, (Paths, Unknown)):
        raise Ends(f"{call.name} with a computed weight")
    if isinstance(weight, Weight):
        y = b.multiply(y, _lay_along(b, weight.as_role("norm weight"), ndim, channel))
    if bias is not None:
        bias = bias.as_role("norm bias") if isinstance(bias, Weight) else bias
        y = b.add([y, _lay_along(b, bias, ndim, channel)])
    return y


def _lay_along(b: Builder, value: V, ndim: int, channel: int | None) -> V:
    """A vector laid along one axis of a value with ``ndim`` axes; as it is for None."""
    if channel is None:
        return value
    return b.reshape(value, (*b.shape(value), *(1,) * (ndim - 1 - channel)))


def _only_factor(weight: Weight) -> Stored:
    """The one tensor a buffer argument stands for."""
    (stored,) = weight.factors
    return stored
