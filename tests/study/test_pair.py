"""The committed pair of trained networks, and that its check would notice another."""

import importlib.util
from pathlib import Path

import pytest
import torch

PAIR = Path(__file__).parents[2] / "results" / "pair"


@pytest.fixture(scope="module")
def verify():
    spec = importlib.util.spec_from_file_location("verify_pair", PAIR / "verify.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pair_is_verified(verify, capsys):
    assert verify.main(PAIR) == 0
    printed = capsys.readouterr().out
    assert printed.count("equal bit for bit") == 3
    assert printed.endswith("verified\n")


def test_the_library_takes_the_step_of_algorithm_1(verify):
    torch.manual_seed(0)
    x, y = torch.randn(100, 64), torch.randint(10, (100,))
    net = verify.load_network(PAIR / "unbalanced.pt")
    hand, library = (
        verify.take_step(net, step, x, y) for step in (verify.step_by_algorithm_1, verify.step_by_pathsgd)
    )
    for before, a, b in zip(*(one.parameters() for one in (net, hand, library)), strict=True):
        assert torch.allclose(
            a - before, b - before, rtol=1e-4, atol=1e-6 * float(before.detach().abs().max())
        )
        assert not torch.equal(a, before)


def scale_a_unit(state, incoming, outgoing):
    """Unit 0 of the first hidden layer; a rescaling if outgoing is 1 / incoming."""
    state["0.weight"][0] *= incoming
    state["0.bias"][0] *= incoming
    state["2.weight"][:, 0] *= outgoing


@pytest.mark.parametrize(
    ("factors", "reason"),
    [
        ((1, 1), "the two have the same weights"),
        ((2, 1), "expected them to be equal"),  # another function
        ((3, 1 / 3), "expected them to be equal"),  # one function, but rounded
    ],
)
def test_another_pair_is_not(verify, tmp_path, capsys, factors, reason):
    state = torch.load(PAIR / "balanced.pt", weights_only=True)
    torch.save(state, tmp_path / "balanced.pt")
    scale_a_unit(state, *factors)
    torch.save(state, tmp_path / "unbalanced.pt")
    assert verify.main(tmp_path) == 1
    assert capsys.readouterr().err == f"NOT verified: {reason}\n"
