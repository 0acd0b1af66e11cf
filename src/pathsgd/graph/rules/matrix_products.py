"""Products of matrices: by a weight, by a softmax, of two activations."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import replace

from pathsgd.graph.builder import Builder, Choice, Ends, Paths, Unknown, Value, is_zero
from pathsgd.graph.nodes import Conv, Shape, Weight, Window, number
from pathsgd.graph.rules.registry import Call, rule
from pathsgd.graph.rules.weighted import add_bias, end_at_computed_weight, read_input, times

LETTERS = string.ascii_lowercase


@rule("linear")
def linear(b: Builder, call: Call) -> Value:
    if is_zero(call["input"]):
        # The zero state a recurrence starts from: no path but the bias, whatever the weight.
        zero = b.multiply_zeros(call["weight"], call.shape)
        return zero if call.get("bias") is None else b.paths(call.weight("bias").as_role("bias"), call.shape)
    x, weight = read_input(b, call), call["weight"]
    if isinstance(weight, Unknown):
        return add_bias(b, end_at_computed_weight(b, call, x, weight), call)
    if isinstance(weight, Paths):
        lead = LETTERS[: len(call.shape) - 1]
        return add_bias(b, contract(b, call, (x, weight), (f"{lead}y", "zy"), f"{lead}z"), call)
    return add_bias(b, b.linear(x, call.weight("weight")), call)


@rule("matmul", "mm", "bmm", "mv", "dot")
def matmul(b: Builder, call: Call) -> Value:
    left: Value = call["self"]
    right: Value = call.get("other", "mat2", "vec", "tensor")
    if is_zero(left) or is_zero(right):
        return b.multiply_zeros(right if is_zero(left) else left, call.shape)
    return multiply_matrices(b, call, left, right)


@rule("addmm", "baddbmm")
def addmm(b: Builder, call: Call) -> Value:
    left, right = call.get("mat1", "batch1"), call.get("mat2", "batch2")
    result = b.times(multiply_matrices(b, call, left, right), call.get("alpha", default=1))
    beta = call.get("beta", default=1)
    if beta == 0:
        return result
    added: Value = call["self"]
    if isinstance(added, Weight):
        added = added.as_role("bias")
    return b.add([result, times(b, call, added, number(beta))])


def multiply_matrices(b: Builder, call: Call, left: Value, right: Value) -> Paths:
    """A matrix product of an activation with a weight, a softmax or another activation."""
    if isinstance(left, Paths) and left.mixes and isinstance(right, Paths) and len(b.shape(left)) > 1:
        return attend(b, right, queries=b.shape(left)[-2], shape=call.shape)
    rows, columns = len(b.shape(left)), len(b.shape(right))
    lead = LETTERS[: max(rows, columns, 2) - 2]
    first = f"{lead[len(lead) + 2 - rows :] if rows > 2 else ''}{'y' if rows == 1 else 'xy'}"
    second = f"{lead[len(lead) + 2 - columns :] if columns > 2 else ''}{'y' if columns == 1 else 'yz'}"
    target = f"{lead}{'x' if rows > 1 else ''}{'z' if columns > 1 else ''}"
    return contract(b, call, (left, right), (first, second), target)


def contract(
    b: Builder, call: Call, values: tuple[Value, Value], axes: tuple[str, str], target: str
) -> Paths:
    """Sums of products of entries of two values, whose axes have letters as for einsum."""
    left, right = values
    if isinstance(left, (Weight, Choice)) and isinstance(right, Paths):
        return contract(b, call, (right, left), (axes[1], axes[0]), target)
    if not isinstance(left, Paths) and not isinstance(right, Paths):
        raise Ends("a weight computed from other tensors")
    if isinstance(left, Paths) and isinstance(right, Weight):
        return _apply_weight(b, left, right, axes, target, call.shape)
    if isinstance(left, Paths) and isinstance(right, Choice) and axes[1][0] in target:
        return apply_one_of(b, left, right.weight, (axes[0], axes[1][1:]), target, call.shape)
    unknown = next((value.reason for value in values if isinstance(value, Unknown)), "")
    reason = unknown or f"{call.name} of two activations"
    return b.multiply_activations(values, reason, call.shape, axes, target)


def _apply_weight(
    b: Builder, x: Paths, weight: Weight, axes: tuple[str, str], target: str, shape: Shape
) -> Paths:
    """A linear layer; or one for each place along the axes that all three have, as for experts or heads: a
    convolution of so many groups."""
    own, of_weight = axes
    sizes = dict(zip(own, b.shape(x), strict=True))
    # An axis of size one is the same for all places.
    dropped = {k for k, n in zip(of_weight, weight.shape, strict=True) if n == 1 and k in own and k in target}
    kept = [k for k in of_weight if k not in dropped]
    weight = b.reshape(weight, [n for k, n in zip(of_weight, weight.shape, strict=True) if k in kept])
    groups = [k for k in kept if k in own and k in target]
    summed = [k for k in own if k in kept and k not in target]
    new = [k for k in kept if k not in own]
    if any(k not in target for k in new) or any(k not in target and k not in summed for k in own):
        raise Ends("a sum over an axis of one factor of a product")
    if any(sizes[k] != n for k, n in zip(kept, weight.shape, strict=True) if k in sizes):
        raise Ends("a weight for several entries that are one")
    places = [k for k in own if k not in groups and k not in summed]
    order = [*groups, *new, *summed]
    weight = b.permute(weight, [kept.index(k) for k in order])
    first, last = len(groups), len(groups) + len(new)
    g, n, k = (
        math.prod(part) for part in (weight.shape[:first], weight.shape[first:last], weight.shape[last:])
    )
    m = math.prod(sizes[axis] for axis in places)
    x = b.permute(x, [own.index(k) for k in (*places, *groups, *summed)])
    if groups:
        x = b.reshape(x, (m, g * k, 1))
        kernel = b.reshape(weight, (g * n, k, 1))
        y = b.conv(x, Conv(kernel, (1,), (0,), (1,), g, output_padding=(0,)), (m, g * n, 1))
    else:
        y = b.linear(b.reshape(x, (*(sizes[axis] for axis in places), k)), b.reshape(weight, (n, k)))
    sizes |= dict(zip(order, weight.shape, strict=True))
    result = [*places, *groups, *new]
    y = b.reshape(y, [sizes[k] for k in result])
    return b.reshape(b.permute(y, [result.index(k) for k in target]), shape)


def apply_one_of(
    b: Builder, x: Paths, weight: Weight | None, axes: tuple[str, str], target: str, shape: Shape
) -> Paths:
    """A linear layer by one of several matrices, chosen by the input: the mean over all of them, as if each
    were chosen as often, so that the units of all experts are rescaled together. Other fixed shares would
    leave rescalings as they are."""
    assert weight is not None
    count, each = weight.shape[0], next(c for c in LETTERS.upper() if c not in "".join(axes))
    sizes = dict(zip(axes[0] + axes[1], (*b.shape(x), *weight.shape[1:]), strict=True))
    whole = [sizes[letter] for letter in target]
    y = _apply_weight(b, x, weight, (axes[0], each + axes[1]), each + target, (count, *whole))
    return b.reshape(b.times(b.reduce(y, (0,)), 1 / count), shape)


@rule("transformers::grouped_mm_fallback", "_grouped_mm")
def grouped_mm(b: Builder, call: Call) -> Value:
    """Rows of an activation, each times the matrix of its expert."""
    x, weight = call.get("input", "self"), call.get("weight", "mat2")
    call.ignore("offs")
    if not isinstance(x, Paths) or not isinstance(weight, Weight) or len(weight.shape) != 3:
        raise Ends("a grouped matrix product of no activation with weights")
    return apply_one_of(b, x, weight, ("xy", "yz"), "xz", call.shape)


@rule("bilinear")
def bilinear(b: Builder, call: Call) -> Value:
    """A linear layer of the first input, whose outputs are multiplied by the second."""
    first, second, weight = call.paths("input1"), call["input2"], call.weight("weight")
    lead = LETTERS[: len(call.shape) - 1]
    middle = (*call.shape[:-1], weight.shape[0], weight.shape[2])
    h = _apply_weight(b, first, weight, (f"{lead}x", "zxy"), f"{lead}zy", middle)
    y = contract(b, call, (h, second), (f"{lead}zy", f"{lead}y"), f"{lead}z")
    return add_bias(b, y, call)


@rule("einsum")
def einsum(b: Builder, call: Call) -> Value:
    values = call["tensors"]
    axes, target = _read_equation(call["equation"], [len(b.shape(value)) for value in values])
    if any(len(set(own)) < len(own) for own in axes):
        raise Ends("einsum along a diagonal")
    if len(values) > 1:
        sizes: dict[str, int] = {}
        for value, own in zip(values, axes, strict=True):
            sizes |= {k: max(n, sizes.get(k, n)) for k, n in zip(own, b.shape(value), strict=True)}
        result, letters = values[0], axes[0]
        for n in range(1, len(values)):  # one after the other
            needed = {*target, *"".join(axes[n + 1 :])}
            kept = "".join(k for k in dict.fromkeys(letters + axes[n]) if k in needed)
            kept = target if n == len(values) - 1 else kept
            part = replace(call, shape=tuple(sizes[k] for k in kept))
            result, letters = contract(b, part, (result, values[n]), (letters, axes[n]), kept), kept
        return result
    if not isinstance(values[0], Paths):
        raise Ends("einsum of a weight")
    x, (own,) = values[0], axes
    summed = [d for d, letter in enumerate(own) if letter not in target]
    x = b.reduce(x, summed) if summed else x
    x = b.reshape(x, [n for d, n in enumerate(b.shape(x)) if d not in summed])
    left = [letter for letter in own if letter in target]
    return b.permute(x, [left.index(letter) for letter in target])


def _read_equation(equation: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """The letters of the axes of all operands, and of the result."""
    operands, arrow, target = equation.replace(" ", "").partition("->")
    names = operands.split(",")
    spread = [n - len(name) + 3 if "..." in name else 0 for name, n in zip(names, ndims, strict=True)]
    unused = "".join(c for c in LETTERS + LETTERS.upper() if c not in equation)[: max(spread)]
    axes = [
        name.replace("...", unused[max(spread) - n :] if n else "")
        for name, n in zip(names, spread, strict=True)
    ]
    if not arrow:
        once = sorted(c for c in set(operands) - set(",.") if operands.count(c) == 1)
        target = ("..." if max(spread) else "") + "".join(once)
    return axes, target.replace("...", unused)


def attend(b: Builder, values: Paths, queries: int, shape: Shape) -> Paths:
    """``softmax(.) @ V``: linear in V with weights that sum to one, taken as an average over the keys.

    The true weights depend on the data; any fixed ones that sum to one leave the rescalings of V and
    of the output projection as they are, and these make the result that of average pooling.
    """
    if len(b.shape(values)) < 2:
        raise Ends("a softmax applied to a vector")
    keys = b.shape(values)[-2]
    average = b.times(b.reduce(values, (len(b.shape(values)) - 2,)), 1 / max(keys, 1))
    target = (*shape[:-2], queries, shape[-1]) if len(shape) > 1 else shape
    lead = b.shape(average)
    if len(target) < len(lead):
        average = b.reshape(average, lead[-len(target) :])
    return b.expand(average, target)


@rule("scaled_dot_product_attention", "flex_attention")
def scaled_dot_product_attention(b: Builder, call: Call) -> Value:
    """Whatever is done to the scores, and whichever are masked."""
    names = ("query", "key", "value") if "query" in call.arguments else ("0", "1", "2")
    heads, reason = call.shape[:-2], "queries and keys of attention enter a softmax"
    query, key, values = (_repeat_heads(b, call[name], heads) for name in names)
    if not isinstance(values, Paths):
        raise Ends("attention to values that are no activations")
    lead = "abcdefgh"[: len(heads)]
    shape = (*heads, call.shape[-2], b.shape(key)[-2])
    scores = b.multiply_activations([query, key], reason, shape, (f"{lead}xy", f"{lead}zy"), f"{lead}xz")
    b.end(scores, reason)
    return attend(b, values, call.shape[-2], call.shape)


def _repeat_heads(b: Builder, value: Value, heads: Shape) -> Value:
    """Keys or values of groups of queries, for each of these."""
    own = b.shape(value)[:-2]
    if own == heads:
        return value
    value = b.paths(value)
    if len(own) != len(heads) or own[:-1] != heads[:-1] or heads[-1] % own[-1]:
        return b.expand(value, (*heads, *b.shape(value)[-2:]))
    index = tuple(k // (heads[-1] // own[-1]) for k in range(heads[-1]))
    return b.axis_map(value, len(own) - 1, Window("gather", own[-1], heads[-1], index=index))
