"""The oracle checked against itself: definitions against Algorithm 1, and the paper's theorems."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathsgd.dag import Dag

EXPONENTS = (1.0, 1.5, 2.0, 3.0, math.inf)
exponents = st.sampled_from(EXPONENTS)
scales = st.floats(0.01, 100.0)
powers_of_two = st.integers(-10, 10).map(lambda k: 2.0**k)
weights = st.integers(-10, 10).map(lambda k: k / 7)  # often zero, never nearly zero
nonzero_weights = weights.filter(bool)
properties = settings(max_examples=50, deadline=None)


def close(expected):
    """Equal to 1e-10 relative; a zero has to be met exactly."""
    return pytest.approx(expected, rel=1e-10, abs=0.0)


@st.composite
def dags(draw, *, min_hidden=0, fixed=True):
    """Random networks with skip connections: every unit may feed every later one."""
    inputs = [f"x{i}" for i in range(draw(st.integers(1, 3)))]
    constants = [f"one{i}" for i in range(draw(st.integers(0, 2)))]
    hidden = [f"h{i}" for i in range(draw(st.integers(min_hidden, 4)))]
    outputs = [f"y{i}" for i in range(draw(st.integers(1, 3)))]
    earlier, edges = inputs + constants, []
    for v in hidden + outputs:
        tails = draw(st.lists(st.sampled_from(earlier), min_size=1, unique=True))
        edges += [(u, v) for u in tails]
        if v in hidden:
            earlier = [*earlier, v]
    return Dag(
        weights={edge: draw(weights) for edge in edges},
        inputs=inputs,
        outputs=outputs,
        constants=constants,
        fixed=draw(st.sets(st.sampled_from(edges))) if fixed else (),
        linear=draw(st.sets(st.sampled_from(hidden))) if hidden else (),
    )


@st.composite
def layered(draw):
    """Layered networks without biases and with one output, no weight 0, and their depth."""
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    layers = [[f"{depth}.{i}" for i in range(width)] for depth, width in enumerate([*widths, 1])]
    edges = [(u, v) for k in range(len(widths)) for u in layers[k] for v in layers[k + 1]]
    dag = Dag({edge: draw(nonzero_weights) for edge in edges}, layers[0], layers[-1])
    return dag, len(widths)


def hidden_units(dag):
    return [u for u in dag.units if u not in {*dag.inputs, *dag.constants, *dag.outputs}]


def examples(dag):
    return st.fixed_dictionaries(dict.fromkeys(dag.inputs, weights))


EXAMPLE = Dag(
    weights={
        ("x", "h"): 3.0,
        ("one", "h"): -0.5,
        ("h", "y"): 2.0,
        ("x", "y"): -1.0,
        ("h", "z"): 0.0,
    },
    inputs=["x"],
    outputs=["y", "z"],
    constants=["one"],
)


def test_example_by_hand():
    assert EXAMPLE.path_vector() == {
        (("x", "h"), ("h", "y")): 6.0,
        (("x", "h"), ("h", "z")): 0.0,
        (("x", "y"),): -1.0,
        (("one", "h"), ("h", "y")): -1.0,
        (("one", "h"), ("h", "z")): -0.0,
    }
    assert EXAMPLE.path_count == 5
    assert EXAMPLE.phi(1) == 8.0
    assert EXAMPLE.phi(2) == math.sqrt(38.0)
    assert EXAMPLE.phi(math.inf) == 6.0
    assert EXAMPLE.phi_per_output(1) == {"y": 8.0, "z": 0.0}
    assert EXAMPLE.gamma_in(2) == {"x": 1.0, "one": 1.0, "h": 9.25, "y": 38.0, "z": 0.0}
    assert EXAMPLE.gamma_out(2) == {
        "x": 37.0,
        "one": 1.0,
        "h": 4.0,
        "y": 1.0,
        "z": 1.0,
    }
    assert EXAMPLE.gamma(2) == EXAMPLE.gamma_algorithm1(2)
    assert EXAMPLE.gamma(2) == {
        ("x", "h"): 4.0,
        ("one", "h"): 4.0,
        ("h", "y"): 9.25,
        ("x", "y"): 1.0,
        ("h", "z"): 9.25,
    }
    assert EXAMPLE.gamma(1)["h", "z"] == 3.5**2
    assert EXAMPLE.gamma(math.inf)["h", "z"] == 3.0**2
    assert EXAMPLE.mu(1, 1) == 6.5
    assert EXAMPLE.mu(2, 2) == math.sqrt(9.0 + 0.25 + 4.0 + 1.0)
    assert EXAMPLE.mu(1, math.inf) == 3.5
    assert EXAMPLE.mu(math.inf, 1) == 5.0
    assert EXAMPLE.forward({"x": 1.0}) == {"y": 4.0, "z": 0.0}
    assert EXAMPLE.forward({"x": -1.0}) == {"y": 1.0, "z": 0.0}
    assert replace(EXAMPLE, linear=["h"]).forward({"x": -1.0}) == {"y": -6.0, "z": 0.0}


def test_fixed_edges_lie_on_paths_but_not_in_mu():
    dag = replace(EXAMPLE, fixed=[("x", "y"), ("one", "h")])
    assert dag.phi(1) == EXAMPLE.phi(1)
    assert dag.gamma(1) == EXAMPLE.gamma(1)
    assert dag.mu(1, 1) == 5.0


def test_a_dag_keeps_its_own_copy():
    edges, linear = {("x", "h"): 1.0, ("h", "y"): 1.0}, {"h"}
    dag = Dag(edges, ["x"], ["y"], linear=linear)
    edges["x", "h"] = 5.0
    linear.clear()
    assert dag.forward({"x": -1.0}) == {"y": -1.0}


@properties
@given(dags())
def test_paths_run_from_source_to_output_and_are_counted(dag):
    paths = list(dag.paths())
    assert len(paths) == len(set(paths)) == dag.path_count
    for path in paths:
        assert path[0][0] in (*dag.inputs, *dag.constants)
        assert path[-1][1] in dag.outputs
        assert all(edge in dag.weights for edge in path)
        assert all(edge[1] == following[0] for edge, following in pairwise(path))


@properties
@given(dags(), exponents)
def test_enumeration_is_algorithm_1(dag, p):
    assert dag.gamma(p) == close(dag.gamma_algorithm1(p))


@properties
@given(dags(), exponents)
def test_phi_is_the_forward_pass_of_algorithm_1(dag, p):
    root = 1.0 if p == math.inf else 1 / p
    gamma_in = dag.gamma_in(p)
    per_output = {unit: gamma_in[unit] ** root for unit in dag.outputs}
    assert dag.phi_per_output(p) == close(per_output)
    if p == math.inf:
        assert dag.phi(p) == close(max(per_output.values()))
    else:
        assert dag.phi(p) == close(sum(phi**p for phi in per_output.values()) ** root)


@properties
@given(dags())
def test_a_linear_network_is_its_path_vector(dag):
    dag = replace(dag, linear=hidden_units(dag), constants=(), inputs=(*dag.inputs, *dag.constants))
    for source in dag.inputs:
        outputs = dag.forward({unit: float(unit == source) for unit in dag.inputs})
        for unit in dag.outputs:
            ends = [
                product
                for path, product in dag.path_vector().items()
                if path[0][0] == source and path[-1][1] == unit
            ]
            assert outputs[unit] == pytest.approx(math.fsum(ends), rel=1e-10, abs=1e-10)


@properties
@given(dags(), st.sampled_from((*EXPONENTS, 1.25)), exponents)
def test_group_norm_is_its_formula(dag, p, q):
    def norm(values, r):
        return max(values, default=0) if r == math.inf else sum(v**r for v in values) ** (1 / r)

    incoming = {
        v: [abs(w) for (u, head), w in dag.weights.items() if head == v and (u, v) not in dag.fixed]
        for v in dag.units
    }
    expected = norm([norm(values, p) for values in incoming.values() if values], q)
    assert dag.mu(p, q) == close(expected)


@properties
@given(dags(min_hidden=1, fixed=False), exponents, scales, st.data())
def test_rescaling_changes_no_output_no_phi_and_no_invariant(dag, p, c, data):
    unit = data.draw(st.sampled_from(hidden_units(dag)))
    x = data.draw(examples(dag))
    rescaled = dag.rescale(unit, c)
    largest = max(1.0, *map(abs, x.values())) * dag.phi(1)
    assert rescaled.forward(x) == pytest.approx(dag.forward(x), rel=1e-10, abs=1e-12 * largest)
    assert rescaled.phi(p) == close(dag.phi(p))
    assert rescaled.phi_per_output(p) == close(dag.phi_per_output(p))
    assert rescaled.path_vector() == close(dag.path_vector())
    assert invariants(rescaled, p) == close(invariants(dag, p))
    assert rescaled.rescale(unit, 1 / c).weights == close(dag.weights)


def invariants(dag, p):
    gamma = dag.gamma(p)
    return {edge: weight**2 * gamma[edge] for edge, weight in dag.weights.items()}


@properties
@given(dags(min_hidden=1, fixed=False), powers_of_two, st.data())
def test_rescaling_by_a_power_of_two_is_exact(dag, c, data):
    unit = data.draw(st.sampled_from(hidden_units(dag)))
    x = data.draw(examples(dag))
    rescaled = dag.rescale(unit, c)
    assert rescaled.forward(x) == dag.forward(x)
    assert rescaled.path_vector() == dag.path_vector()
    assert rescaled.rescale(unit, 1 / c).weights == dag.weights


@properties
@given(dags(), exponents, st.data())
def test_moving_one_weight_moves_the_path_vector_by_gamma(dag, p, data):
    """1/2 ||pi(w) - pi(w_t)||_p^2 = 1/2 (w_e - w_e_t)^2 gamma_p: the update rule's exact metric."""
    edge = data.draw(st.sampled_from(sorted(dag.weights)))
    moved = replace(dag, weights={**dag.weights, edge: dag.weights[edge] + data.draw(weights)})
    before, after = dag.path_vector(), moved.path_vector()
    changes = [abs(after[path] - before[path]) for path in before]
    squared_norm = max(changes, default=0.0) ** 2
    if p < math.inf:
        squared_norm = math.fsum(change**p for change in changes) ** (2 / p)
    step = moved.weights[edge] - dag.weights[edge]
    assert squared_norm / 2 == close(step**2 * dag.gamma(p)[edge] / 2)


@properties
@given(dags(), st.data())
def test_gradient_of_a_linear_network_is_its_slope(dag, data):
    """Without activations the output is affine in each weight, so one step of 1 shows the slope."""
    dag = replace(dag, linear=hidden_units(dag), fixed=())
    x = data.draw(examples(dag))
    gradient = dag.gradient(x, dict.fromkeys(dag.outputs, 1.0))
    for edge, weight in dag.weights.items():
        stepped = replace(dag, weights={**dag.weights, edge: weight + 1.0})
        slope = math.fsum(stepped.forward(x).values()) - math.fsum(dag.forward(x).values())
        assert gradient[edge] == pytest.approx(slope, rel=1e-10, abs=1e-10)


def test_gradient_by_hand():
    active = EXAMPLE.gradient({"x": 1.0}, {"y": 1.0, "z": 10.0})
    assert active == {
        ("x", "h"): 2.0,
        ("one", "h"): 2.0,
        ("h", "y"): 2.5,
        ("x", "y"): 1.0,
        ("h", "z"): 25.0,
    }
    inactive = EXAMPLE.gradient({"x": -1.0}, {"y": 1.0, "z": 10.0})
    assert {edge for edge, slope in inactive.items() if slope} == {("x", "y")}
    without_fixed = replace(EXAMPLE, fixed=[("x", "y")]).gradient({"x": 1.0}, {"y": 1.0, "z": 10.0})
    assert without_fixed == {edge: g for edge, g in active.items() if edge != ("x", "y")}


@properties
@given(dags(min_hidden=1, fixed=False), exponents, powers_of_two, st.data())
def test_path_sgd_is_rescaling_invariant(dag, p, c, data):
    """The paper's theorem: a step from the rescaled network is the rescaled step."""
    unit = data.draw(st.sampled_from(hidden_units(dag)))
    x, lr = data.draw(examples(dag)), 0.1

    def step(network):
        gradient = network.gradient(x, dict.fromkeys(network.outputs, 1.0))
        return network.path_sgd_step(gradient, lr, p)

    expected = step(dag).weights
    actual = step(dag.rescale(unit, c)).rescale(unit, 1 / c).weights
    for edge, weight in dag.weights.items():
        size = abs(weight) + abs(expected[edge] - weight)
        assert abs(actual[edge] - expected[edge]) <= 1e-10 * size


def test_path_sgd_step_by_hand():
    dag = replace(EXAMPLE, fixed=[("x", "y")])
    stepped = dag.path_sgd_step(dag.gradient({"x": 1.0}, {"y": 1.0, "z": 10.0}), lr=0.5, p=2)
    assert stepped.weights == {
        ("x", "h"): 3.0 - 0.5 * 2.0 / 4.0,
        ("one", "h"): -0.5 - 0.5 * 2.0 / 4.0,
        ("h", "y"): 2.0 - 0.5 / 9.25 * 2.5,
        ("x", "y"): -1.0,
        ("h", "z"): 0.0 - 0.5 / 9.25 * 25.0,
    }


def test_a_weight_that_no_path_counts_stays():
    dag = Dag({("x", "h"): 2.0, ("h", "y"): 0.0}, ["x"], ["y"])
    stepped = dag.path_sgd_step({("x", "h"): 0.0, ("h", "y"): 0.0}, lr=1.0, p=2)
    assert dag.gamma(2)["x", "h"] == 0.0
    assert stepped.weights == dag.weights


@properties
@given(layered(), exponents, st.data())
def test_lemma_1_on_layered_networks(network, p, data):
    """phi_p = min mu_{p,inf}^d, for layered networks without biases and with one output."""
    dag, depth = network
    for unit in hidden_units(dag):
        dag = dag.rescale(unit, data.draw(scales))
    assert dag.phi(p) <= dag.mu(p, math.inf) ** depth * (1 + 1e-10)

    target = dag.phi(p) ** (1 / depth)
    for unit in hidden_units(dag):
        into_unit = {edge: weight for edge, weight in dag.weights.items() if edge[1] == unit}
        norm = Dag(into_unit, [u for u, _ in into_unit], [unit]).phi(p)
        dag = dag.rescale(unit, target / norm)
    assert dag.phi(p) == close(dag.mu(p, math.inf) ** depth)


def test_lemma_1_fails_with_two_outputs():
    """As printed the lemma says phi <= mu^d; two outputs break it."""
    dag = Dag({("x", "y"): 1.0, ("x", "z"): 1.0}, ["x"], ["y", "z"])
    assert dag.mu(2, math.inf) ** 1 < dag.phi(2)


def test_lemma_1_fails_with_a_skip_connection():
    """The least mu is the golden ratio M = 1 + 1/M, and M^2 is not phi = 2."""
    golden = (1 + math.sqrt(5)) / 2
    dag = Dag({("x", "h"): 1.0, ("h", "y"): 1.0, ("x", "y"): 1.0}, ["x"], ["y"])
    assert dag.phi(1) == 2.0
    assert dag.rescale("h", golden).mu(1, math.inf) == pytest.approx(golden)
    assert min(dag.rescale("h", 0.1 * k).mu(1, math.inf) for k in range(1, 50)) >= golden


def test_a_long_chain_is_walked_without_recursion():
    edges = {(k, k + 1): 1.0 for k in range(5000)}
    dag = Dag(edges, [0], [5000])
    assert dag.path_count == 1
    assert dag.phi(2) == 1.0


def test_dead_ends_are_not_walked():
    """The ladder has 2^60 ways to nowhere and one path."""
    edges = {("x", "y"): 1.0, ("x", "0a"): 1.0, ("x", "0b"): 1.0}
    for k in range(60):
        edges |= {(f"{k}{s}", f"{k + 1}{t}"): 1.0 for s in "ab" for t in "ab"}
    assert list(Dag(edges, ["x"], ["y"]).paths()) == [(("x", "y"),)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weights": {("x", "a"): 1.0, ("a", "b"): 1.0, ("b", "a"): 1.0, ("b", "y"): 1.0}},
            r"cycle: '(a' -> 'b' -> 'a|b' -> 'a' -> 'b)'\. .*unroll",
        ),
        ({"weights": {("x", "h"): 1.0, ("h", "h"): 1.0, ("h", "y"): 1.0}}, "cycle: 'h' -> 'h'"),
        ({"inputs": ["X"]}, "'x' has no incoming edge: list it in inputs"),
        ({"outputs": ["Y"]}, "'Y' has no incoming edge"),
        ({"inputs": ["x", "h"]}, "'h' is an input or constant, but 'x' feed it"),
        ({"constants": ["h"]}, "'h' is an input or constant, but 'x' feed it"),
        ({"outputs": ["h", "y"]}, "'h' is an output, but feeds 'y': make it hidden"),
        ({"inputs": ["x", "x"]}, "'x' is listed 2 times"),
        ({"outputs": ["x", "y"]}, "'x' is listed 2 times"),
        ({"fixed": [("x", "y")]}, r"Unknown edge \('x', 'y'\) in fixed"),
        ({"linear": ["g"]}, "Unknown unit 'g': the units are 'h', 'x', 'y'"),
    ],
)
def test_a_network_that_makes_no_sense_is_refused(changes, message):
    network = {"weights": {("x", "h"): 1.0, ("h", "y"): 1.0}, "inputs": ["x"], "outputs": ["y"]}
    with pytest.raises(ValueError, match=message):
        Dag(**{**network, **changes})


@pytest.mark.parametrize(
    ("unit", "c", "message"),
    [
        ("g", 2.0, "Unknown unit 'g'"),
        ("x", 2.0, "Cannot rescale 'x', an input"),
        ("one", 2.0, "Cannot rescale 'one', an input, constant"),
        ("y", 2.0, "Cannot rescale 'y', an input, constant or output"),
        ("h", 0.0, "Invalid factor for unit 'h': 0.0"),
        ("h", -1.0, "Invalid factor for unit 'h': -1.0"),
        ("h", math.inf, "Invalid factor for unit 'h': inf"),
        ("h", math.nan, "Invalid factor for unit 'h': nan"),
    ],
)
def test_a_rescaling_that_makes_no_sense_is_refused(unit, c, message):
    with pytest.raises(ValueError, match=message):
        EXAMPLE.rescale(unit, c)


@pytest.mark.parametrize("edge", [("x", "h"), ("h", "y")])
def test_a_fixed_edge_cannot_be_rescaled(edge):
    with pytest.raises(ValueError, match=r"Cannot rescale 'h', its edge .* is fixed"):
        replace(EXAMPLE, fixed=[edge]).rescale("h", 2.0)


@pytest.mark.parametrize("p", [0.5, 0.0, -1.0, math.nan])
@pytest.mark.parametrize(
    "measure",
    [
        Dag.phi,
        Dag.phi_per_output,
        Dag.gamma,
        Dag.gamma_in,
        Dag.gamma_out,
        Dag.gamma_algorithm1,
        lambda dag, p: dag.mu(p, 2.0),
        lambda dag, q: dag.mu(2.0, q),
        lambda dag, p: dag.path_sgd_step(dict.fromkeys(dag.weights, 1.0), 0.1, p),
    ],
)
def test_exponents_below_one_are_refused(measure, p):
    with pytest.raises(ValueError, match="Invalid exponent"):
        measure(EXAMPLE, p)


@pytest.mark.parametrize(
    "measure", [Dag.paths, Dag.path_vector, lambda dag: dag.phi(2), lambda dag: dag.gamma(2)]
)
def test_too_many_paths_are_refused(measure):
    layers = [[f"{depth}.{i}" for i in range(10)] for depth in range(7)]
    edges = {(u, v): 1.0 for k in range(6) for u in layers[k] for v in layers[k + 1]}
    dag = Dag(edges, layers[0], layers[-1])
    with pytest.raises(ValueError, match=r"10000000 paths are too many .*gamma_algorithm1"):
        measure(dag)
    assert dag.gamma_algorithm1(1)["0.0", "1.0"] == (10.0**5) ** 2


def test_values_have_to_be_given_for_the_inputs_and_nothing_else():
    with pytest.raises(ValueError, match="Missing 'x' in x"):
        EXAMPLE.forward({})
    with pytest.raises(ValueError, match="Unknown 'one' in x: expected 'x'"):
        EXAMPLE.forward({"x": 1.0, "one": 1.0})
    with pytest.raises(ValueError, match="Missing 'z' in output_gradient"):
        EXAMPLE.gradient({"x": 1.0}, {"y": 1.0})
    with pytest.raises(ValueError, match=r"Unknown \('x', 'g'\) in gradient"):
        EXAMPLE.path_sgd_step({**EXAMPLE.weights, ("x", "g"): 1.0}, 0.1, 2)
    with pytest.raises(ValueError, match=r"Missing .* in gradient"):
        EXAMPLE.path_sgd_step({}, 0.1, 2)
