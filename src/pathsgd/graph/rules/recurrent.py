"""Recurrent layers that export keeps as one operator, written out over time."""

from __future__ import annotations

from pathsgd.errors import TraceError
from pathsgd.graph.builder import Builder, Ends, Paths, Value, is_zero
from pathsgd.graph.nodes import Weight
from pathsgd.graph.rules.registry import Call, rule


@rule("rnn_relu")
def rnn_relu(b: Builder, call: Call) -> list[Value]:
    """``h_t = relu(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)``, every layer and direction."""
    if not isinstance(call.get("input"), Paths):
        raise Ends("a recurrent layer on a packed sequence")
    x = call.paths("input")
    if len(b.shape(x)) == 3 and not call["batch_first"] and b.shape(x)[1] != 1:
        raise TraceError(
            f"{b.where!r} takes inputs (time, batch, features) but its batch axis still has size "
            f"{b.shape(x)[1]}: pass batch_dim=1 to trace, or make the layer batch_first"
        )
    time = (1 if call["batch_first"] else 0) if len(b.shape(x)) == 3 else 0
    directions = 2 if call["bidirectional"] else 1
    if not all(isinstance(weight, Weight) for weight in call["params"]):
        raise Ends("a recurrent layer with computed weights")
    per_layer = 4 if call["has_biases"] else 2
    parameters: list[Weight] = call["params"]
    groups = [parameters[k : k + per_layer] for k in range(0, len(parameters), per_layer)]
    state = call["hx"]
    finals: list[Paths] = []
    for layer in range(call["num_layers"]):
        runs = []
        for direction in range(directions):
            k = layer * directions + direction
            start = _initial(b, state, k)
            outputs, final = _run(b, x, time, groups[k], start, backward=direction == 1)
            runs.append(outputs)
            finals.append(final)
        x = runs[0] if directions == 1 else b.cat(runs, len(b.shape(x)) - 1)
    stacked = [b.reshape(final, (1, *b.shape(final))) for final in finals]
    return [x, b.cat(stacked, 0) if len(stacked) > 1 else stacked[0]]


def _initial(b: Builder, state: Value, k: int) -> Paths | None:
    """Row ``k`` of the initial state, or None if it is a literal zero."""
    if is_zero(state):
        return None
    whole = b.paths(state)
    return b.reshape(b.slice(whole, 0, k, 1), b.shape(whole)[1:])


def _run(
    b: Builder, x: Paths, time: int, weights: list[Weight], state: Paths | None, backward: bool
) -> tuple[Paths, Paths]:
    w_ih, w_hh, *biases = weights
    shape = b.shape(x)
    steps = shape[time]
    one = shape[:time] + shape[time + 1 :]
    outputs: list[Paths] = []
    for t in reversed(range(steps)) if backward else range(steps):
        x_t = b.reshape(b.slice(x, time, t, 1), one)
        parts: list[Value] = [b.linear(x_t, w_ih), *(bias.as_role("bias") for bias in biases)]
        if state is not None:
            parts.append(b.linear(state, w_hh))
        state = b.add(parts)
        outputs.append(state)
    if state is None:
        raise Ends("a recurrent layer on an empty sequence")
    final = state
    if backward:
        outputs.reverse()
    rows = [b.reshape(h, (*b.shape(h)[:time], 1, *b.shape(h)[time:])) for h in outputs]
    return (b.cat(rows, time) if len(rows) > 1 else rows[0]), final
