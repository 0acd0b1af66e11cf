"""Operators whose weights stand on edges: linear layers, convolutions, embeddings, sums, products entry by
entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pathsgd.graph.builder import MASK, Builder, Ends, Paths, Unknown, Value, broadcast, is_fixed, is_zero
from pathsgd.graph.nodes import Conv, Shape, Weight, number
from pathsgd.graph.rules.pooling import zero_pad
from pathsgd.graph.rules.registry import Call, rule


def add_bias(b: Builder, x: Paths, call: Call, name: str = "bias", channel: int = -1) -> Paths:
    """``x`` plus the bias argument, if there is one, laid along the axis ``channel``."""
    if call.get(name) is None:
        return x
    bias: Value = call[name] if isinstance(call[name], Unknown) else call.weight(name).as_role("bias")
    ndim = len(b.shape(x))
    after = ndim - 1 - channel % ndim
    return b.add([x, b.reshape(bias, (*b.shape(bias), *(1,) * after))])


def read_input(b: Builder, call: Call) -> Paths:
    """What a layer is applied to; a parameter there (a learned query) is a constant's edges."""
    value = call["input"]
    if isinstance(value, Unknown) and not value.parameters:
        return b.paths(replace(value, reason="input"))
    return b.paths(value) if isinstance(value, Weight) else call.paths("input")


def end_at_computed_weight(b: Builder, call: Call, x: Paths, weight: Unknown) -> Paths:
    """A layer whose weight is computed from parameters ends the region; its bias opens the next."""
    b.end(x, weight.reason)
    b.end(weight, weight.reason)
    return b.begin(call.shape, weight.reason)


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
      "convolution")  # fmt: skip
def convolution(b: Builder, call: Call) -> Value:
    x = read_input(b, call)
    if isinstance(call["weight"], Unknown):
        y = end_at_computed_weight(b, call, x, call["weight"])
        return add_bias(b, y, call, channel=len(call.shape) - len(call["weight"].shape) + 1)
    weight = call.weight("weight")
    if len(b.shape(x)) < len(weight.shape):
        batched = b.reshape(x, (1, *b.shape(x)))
        y = _convolution(b, call, batched, weight, (1, *call.shape))
        return b.reshape(y, call.shape)
    return _convolution(b, call, x, weight, call.shape)


def _convolution(b: Builder, call: Call, x: Paths, weight: Weight, shape: Shape) -> Paths:
    n = len(weight.shape) - 2

    def per_axis(name: str, default: int) -> Shape:
        value: Any = call.get(name, default=default)
        value = (value,) if isinstance(value, int) else tuple(value)
        return tuple(value) * n if len(value) == 1 else tuple(value)

    transposed = "transpose" in call.name or bool(call.get("transposed", default=False))
    stride, dilation = per_axis("stride", 1), per_axis("dilation", 1)
    if call.get("padding") in ("same", "valid"):
        padding = (0,) * n
        if call["padding"] == "same":
            for axis in range(n):
                total = dilation[axis] * (weight.shape[2 + axis] - 1)
                x = zero_pad(b, x, 2 + axis, total // 2, total - total // 2)
    else:
        padding = per_axis("padding", 0)
    output_padding = per_axis("output_padding", 0) if transposed else (0,) * n
    groups = call.get("groups", default=1)
    conv = Conv(weight, stride, padding, dilation, groups, transposed, output_padding)
    return add_bias(b, b.conv(x, conv, shape), call, channel=1)


@rule("embedding")
def embedding(b: Builder, call: Call) -> Value:
    """A one-hot input: every row is an edge into every position, whichever tokens the example holds."""
    table = call.weight("weight")
    rows, width = table.shape
    one_hot = b.begin((rows,), "a one-hot input")
    columns = b.permute(table, (1, 0)).as_role("embedding")
    y = b.linear(one_hot, columns)
    return b.expand(b.reshape(y, (1,) * (len(call.shape) - 1) + (width,)), call.shape)


@rule("mul", "multiply")
def mul(b: Builder, call: Call) -> Value:
    return times(b, call, call["self"], call["other"])


def times(b: Builder, call: Call, left: Any, right: Any) -> Value:
    left = number(left) if isinstance(left, (int, float)) else left
    right = number(right) if isinstance(right, (int, float)) else right
    if not (isinstance(left, (Paths, Weight, Unknown)) and isinstance(right, (Paths, Weight, Unknown))):
        raise Ends("a product with a number read from a tensor")
    if is_zero(left) or is_zero(right):
        return replace(number(0), shape=broadcast(b.shape(left), b.shape(right)))
    if isinstance(left, Paths) and isinstance(right, Paths):
        if left.node == right.node:
            return b.square(left)
        shape = broadcast(b.shape(left), b.shape(right))
        return b.multiply_activations([left, right], "a product of two activations", shape)
    if isinstance(left, Paths) or isinstance(right, Paths):
        x, weight = (left, right) if isinstance(left, Paths) else (right, left)
        assert isinstance(x, Paths)
        if isinstance(weight, Unknown):
            if weight.reason == MASK:
                return b.expand(x, broadcast(b.shape(x), weight.shape))  # what it may show counts
            return b.multiply_activations([x, weight], weight.reason, broadcast(b.shape(x), weight.shape))
        assert isinstance(weight, Weight)
        if is_fixed(weight) and weight.shape == () and all(f.literal == (1.0,) for f in weight.factors):
            return x
        return b.multiply(x, weight if is_fixed(weight) else weight.as_role("multiplier"))
    if isinstance(left, Weight) and isinstance(right, Weight):
        if left.parameter is not None and right.parameter is not None:
            raise Ends("a weight computed as a product of parameters")
        # A mask or a constant on a parameter: still one edge weight per entry of the parameter.
        owner = left if left.parameter is not None else right
        return replace(
            owner, shape=broadcast(left.shape, right.shape), factors=(*left.factors, *right.factors)
        )
    raise Ends("a weight computed from other tensors")


@rule("div", "divide", "true_divide")
def div(b: Builder, call: Call) -> Value:
    if call.get("rounding_mode") is not None:
        raise Ends("division with rounding is not positively homogeneous")
    divisor = call["other"]
    if isinstance(divisor, (int, float)):
        return times(b, call, call["self"], 1 / divisor if divisor else float("inf"))
    if isinstance(divisor, (Paths, Unknown)) and isinstance(call["self"], Paths):
        reason = "division by something that is no constant"
        b.end(divisor, reason)
        return b.multiply_activations([call["self"]], reason, call.shape)
    if not is_fixed(divisor):
        raise Ends("division by something that is no constant")
    factors = tuple(replace(factor, inverse=not factor.inverse) for factor in divisor.factors)
    return times(b, call, call["self"], replace(divisor, factors=factors))


@rule("neg", "negative")
def neg(b: Builder, call: Call) -> Value:
    return times(b, call, call["self"], -1.0)


@rule("add", "sub", "subtract", "rsub")
def add(b: Builder, call: Call) -> Value:
    """A difference is a sum with edges of weight -1: on path norms it acts as a sum does."""
    alpha = call.get("alpha", default=1)
    left, right = call["self"], call["other"]
    if call.name == "rsub":
        left, right = right, left
    sign = alpha if call.name == "add" else -alpha
    if isinstance(left, Weight) and isinstance(right, (int, float)):
        return _shift(b, left, sign * right)
    if isinstance(right, Weight) and isinstance(left, (int, float)):
        return times(b, call, _shift(b, right, left / sign), sign)
    left, right = (number(v) if isinstance(v, (int, float)) else v for v in (left, right))
    if not (isinstance(left, Paths) or isinstance(right, Paths)):
        raise Ends("a weight computed as a sum of tensors")
    right = times(b, call, right, sign)
    return b.add([v.as_role("bias") if isinstance(v, Weight) else v for v in (left, right)])


def _shift(b: Builder, weight: Weight, by: float) -> Weight:
    """A parameter with a number added to it, as a gain of ``1 + weight``."""
    if weight.parameter is None or weight.factors:
        raise Ends("a weight computed as a sum of tensors")
    if weight.parameter.name in b.narrow:
        b.notes.append("gains that are stored without their 1 are not rescaled in 16 bits: keep them in fp32")
        raise Ends("a gain of 16 bits that is stored without its 1")
    return replace(weight, parameter=replace(weight.parameter, shift=weight.parameter.shift + by))
