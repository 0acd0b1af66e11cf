"""Recurrent layers and cells that export keeps as one operator.

Those of ReLU units are written out over time. Gates are not positively homogeneous, so no rescaling passes
a tanh or a sigmoid, nor a state that is multiplied by gates. What is left is on both sides of them: the
units that a layer reads against its input weights, and the projection of an LSTM (``proj_size``) against
what reads the projected state.
"""

from __future__ import annotations

from collections.abc import Sequence

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


@rule("rnn_relu_cell")
def rnn_relu_cell(b: Builder, call: Call) -> Value:
    parts: list[Value] = []
    for value, weight, bias in _cell_inputs(b, call, call["hx"]):
        parts += [] if is_zero(value) else [b.linear(b.paths(value), weight)]
        parts += [] if bias is None else [bias.as_role("bias")]
    return b.expand(b.add(parts), call.shape)


@rule("rnn_tanh_cell", "gru_cell", "lstm_cell")
def gated_cell(b: Builder, call: Call) -> list[Value]:
    states = call["hx"] if isinstance(call["hx"], list) else [call["hx"]]
    reason = f"{call.name} is not positively homogeneous"
    if call.name != "rnn_tanh_cell":
        b.end(states[-1], reason)  # the gates multiply it
    for value, weight, bias in _cell_inputs(b, call, states[0]):
        if not is_zero(value):
            _end_at_gates(b, b.paths(value), [weight, bias], reason)
    return [b.begin(call.shape, reason) for _ in states]


def _cell_inputs(b: Builder, call: Call, state: Value) -> list[tuple[Value, Weight, Weight | None]]:
    """What a cell multiplies by weights, with the weights and the bias."""
    weights = [call.weight(name) for name in ("w_ih", "w_hh")]
    biases = [call.weight(name) if call.get(name) is not None else None for name in ("b_ih", "b_hh")]
    b.multiply_zeros(weights[1], ())  # if there is one step alone
    return list(zip([call["input"], state], weights, biases, strict=True))


def _end_at_gates(b: Builder, x: Paths, weights: Sequence[Weight | None], reason: str) -> None:
    """Paths end in what gates are computed from."""
    weight, *biases = weights
    assert weight is not None
    y = b.add([b.linear(x, weight), *(bias.as_role("bias") for bias in biases if bias is not None)])
    b.end(y, reason)


@rule("rnn_tanh", "gru", "lstm")
def gated(b: Builder, call: Call) -> list[Value]:
    """Every time at once: states begin paths, so nothing is written out over time."""
    if not isinstance(call.get("input"), Paths):
        raise Ends("a recurrent layer on a packed sequence")
    parameters: list[Weight] = call["params"]
    if not all(isinstance(weight, Weight) for weight in parameters):
        raise Ends("a recurrent layer with computed weights")
    x, reason = call.paths("input"), f"{call.name} is not positively homogeneous"
    states = call["hx"] if isinstance(call["hx"], list) else [call["hx"]]
    for state in states:
        b.end(state, reason)
    directions = 2 if call["bidirectional"] else 1
    projected = len(states) == 2 and b.shape(states[0])[-1] != b.shape(states[1])[-1]
    per_layer = (4 if call["has_biases"] else 2) + projected
    time = 1 if call["batch_first"] and len(b.shape(x)) == 3 else 0
    finals: list[Paths] = []
    for layer in range(call["num_layers"]):
        runs = []
        for direction in range(directions):
            k = layer * directions + direction
            w_ih, w_hh, *rest = parameters[per_layer * k : per_layer * (k + 1)]
            biases = rest[:2] if call["has_biases"] else [None, None]
            _end_at_gates(b, x, [w_ih, biases[0]], reason)
            h = b.begin((*b.shape(x)[:-1], b.shape(states[-1])[-1]), reason)
            h = b.linear(h, rest[-1]) if projected else h
            _end_at_gates(b, h, [w_hh, biases[1]], reason)
            start = _initial(b, states[0], k)
            if start is not None:
                _end_at_gates(b, start, [w_hh], reason)
            runs.append(h)
            last = b.slice(h, time, 0 if direction else b.shape(h)[time] - 1, 1)
            finals.append(b.permute(last, (time, *(d for d in range(len(b.shape(h))) if d != time))))
        x = runs[0] if directions == 1 else b.cat(runs, len(b.shape(x)) - 1)
    cells = [b.begin(b.shape(state), reason) for state in states[1:]]
    return [x, b.cat(finals, 0) if len(finals) > 1 else finals[0], *cells]


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
    b.multiply_zeros(w_hh, ())  # if there is one step alone
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
