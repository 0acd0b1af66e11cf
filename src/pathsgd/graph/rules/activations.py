"""Activations. A positively homogeneous one is an edge of weight 1; any other ends the region."""

from __future__ import annotations

from typing import Any

from pathsgd.graph.builder import Builder, Choice, Ends, Paths, Unknown, Value
from pathsgd.graph.nodes import Weight
from pathsgd.graph.rules.pooling import reduce_to
from pathsgd.graph.rules.registry import Call, rule

# f(c x) = c f(x) for c > 0: the unit's path weight passes through as it is. Dropout multiplies by a mask.
HOMOGENEOUS = ("relu", "leaky_relu", "rrelu", "abs", "dropout", "native_dropout", "feature_dropout")
CASTS = ("_to_copy", "to", "float", "double")
COPIES = (
    *CASTS, "type_as", "clone", "contiguous", "detach", "alias", "lift_fresh", "lift_fresh_copy", "lift",
    "positive", "conj", "resolve_conj", "resolve_neg",
)  # fmt: skip

# Known not to be: named so that a report can say that it is the mathematics, not a missing rule.
NOT_HOMOGENEOUS = frozenset((
    "gelu", "sigmoid", "tanh", "silu", "mish", "elu", "celu", "selu", "softplus", "softsign", "relu6",
    "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink", "logsigmoid",
    "log_softmax", "_log_softmax", "softmin", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos",
    "lstm", "gru", "rnn_tanh", "local_response_norm", "linalg_vector_norm", "logsumexp",
    "alpha_dropout", "feature_alpha_dropout",
))  # fmt: skip


def why_it_ends(name: str) -> str:
    """The reason given for an operator without a rule."""
    if name in NOT_HOMOGENEOUS:
        return f"{name} is not positively homogeneous"
    return f"there is no rule for the operator {name}"


@rule(*HOMOGENEOUS)
def homogeneous(b: Builder, call: Call) -> list[Value]:
    value: Value = call.get("self", "input")
    if isinstance(value, (Weight, Choice)):
        raise Ends(f"a weight computed by {call.name}")
    # The second output of native_dropout is its mask, which carries no path.
    return [value]


@rule(*COPIES, moves=True, ignores=("other",))
def copy(b: Builder, call: Call) -> Any:
    value: Any = call.get("self", "input")
    if isinstance(value, Unknown):
        if call.name in CASTS and call.floating and not value.parameters:
            return b.begin(call.shape, "input")  # integers made floats: pixels or counts, where paths begin
    elif isinstance(value, (Paths, Weight)) and not call.floating:
        raise Ends("a cast to integers is not positively homogeneous")
    return value


@rule("clamp", "clamp_min")
def clamp(b: Builder, call: Call) -> Value:
    if call["min"] == 0 and call.get("max") is None:
        return call.paths("self")
    raise Ends(f"{call.name} to [{call.get('min')}, {call.get('max')}] is not positively homogeneous")


@rule("threshold")
def threshold(b: Builder, call: Call) -> Value:
    if call["threshold"] == 0 and call["value"] == 0:
        return call.paths("self")
    raise Ends("threshold away from zero is not positively homogeneous")


@rule("masked_fill")
def masked_fill(b: Builder, call: Call) -> Value:
    if call["value"] == 0:
        return b.expand(call.paths("self"), call.shape)
    raise Ends("masked_fill with a value other than zero")


@rule("prelu", "_prelu_kernel")
def prelu(b: Builder, call: Call) -> Value:
    """Two edges: one of weight 1 and one of weight ``slope``, so that the slope has a gamma."""
    x, slope = call.paths("self"), call.weight("weight")
    ndim = len(b.shape(x))
    if call.name == "prelu" and ndim > 1:
        slope = b.reshape(slope, (1, -1) + (1,) * (ndim - 2))
    return b.add([x, b.multiply(x, slope.as_role("slope"))])


@rule("maximum", "minimum", "fmax", "fmin")
def maximum(b: Builder, call: Call) -> Value:
    """The larger of several pieces is maxout: all pieces are incoming edges of one unit."""
    return b.add([call["self"], call["other"]])


@rule("max", "min")
def max_reduce(b: Builder, call: Call) -> Value | list[Value]:
    if "other" in call.arguments:
        return maximum(b, call)
    dims = [call["dim"]] if call.get("dim") is not None else None
    return [reduce_to(b, call.paths("self"), dims, call.shape)]


@rule("amax", "amin")
def amax(b: Builder, call: Call) -> Value:
    return reduce_to(b, call.paths("self"), call.get("dim"), call.shape)


@rule("square")
def square(b: Builder, call: Call) -> Value:
    return b.square(call.paths("self"))


@rule("pow")
def power(b: Builder, call: Call) -> Value:
    if call["exponent"] == 2:
        return b.square(call.paths("self"))
    raise Ends(f"pow with exponent {call['exponent']}")


@rule("glu")
def glu(b: Builder, call: Call) -> Value:
    """A half times the sigmoid of the other: it can be rescaled, though paths end there."""
    x, reason = call.paths("self"), "the sigmoid of glu is not positively homogeneous"
    dim = call.get("dim", default=-1) % len(call.shape)
    half, gate = (b.slice(x, dim, start, call.shape[dim]) for start in (0, call.shape[dim]))
    b.end(gate, reason)
    return b.multiply_activations([half], reason, call.shape)


@rule("view_as_complex", "view_as_real")
def view_as_complex(b: Builder, call: Call) -> Value:
    """A complex number turns as a pair of real ones does: both are rescaled together."""
    x, axes = call.paths("self"), "abcdefgh"[: max(len(call.shape), len(b.shape(call["self"]))) - 1]
    before, after = (f"{axes}z", axes) if call.name == "view_as_complex" else (axes, f"{axes}z")
    return b.multiply_activations([x], "complex numbers", call.shape, [before], after)


@rule("softmax", "_softmax")
def softmax(b: Builder, call: Call) -> Value:
    """Ends the region; what it returns are weights that sum to one (see the rule of attention)."""
    x = call.paths("self")
    b.end(x, "softmax is not positively homogeneous")
    begun = b.begin(call.shape, "softmax")
    last = call["dim"] in (-1, len(call.shape) - 1)
    return Paths(begun.node, mixes=last)
