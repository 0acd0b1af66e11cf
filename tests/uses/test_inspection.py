"""inspect: its numbers against slow ones, what rescalings leave alone, and its figure."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

import pathsgd
from support.networks import SmallResNet, build

LAYERS = ("0", "2", "4")


@pytest.fixture
def model():
    """A balanced network but for unit 1 of layer 0, with a unit that has no weights into it, another that has
    none that lead on, and a third that has a bias alone, so that it is live."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    model[0].weight.data[2], model[0].bias.data[2] = 0, 0
    model[2].weight.data[:, 3] = 0
    model[2].weight.data[5] = 0
    pathsgd.balance(model)
    pathsgd.rescale(model, None, {("0", 1): 2.0**5})
    return model


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True).double(), torch.zeros(1, 5, 8)


def with_batch_norm():
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, bias=False), nn.PReLU(4)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 2)).double().eval()
    nn.init.normal_(model[1].weight)
    return model, torch.zeros(1, 3, 6, 6)


def round_weight(weight, bits):
    levels = 2 ** (bits - 1) - 1
    step = max(abs(w) for w in weight.flatten().tolist()) / levels
    rounded = [[round(w / step) * step for w in row] for row in weight.tolist()]
    return torch.tensor(rounded, dtype=weight.dtype)


def sum_paths(model, layer, weight):
    """The sum of squares of the paths through the matrix of a layer, if that were ``weight``."""
    changed = copy.deepcopy(model)
    changed.get_submodule(layer).weight.data = weight
    for name in LAYERS:
        if name >= layer:  # paths that begin there do not go through the matrix
            nn.init.zeros_(changed.get_submodule(name).bias)
    return pathsgd.path_norm(changed).item() ** 2


def measure_loss(model, layer, bits):
    weight = model.get_submodule(layer).weight.detach()
    return sum_paths(model, layer, weight - round_weight(weight, bits)) / sum_paths(model, layer, weight)


def test_its_numbers_are_those_of_paths(model):
    state = copy.deepcopy(model.state_dict())
    found = pathsgd.inspect(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert found.ratio == pytest.approx(pathsgd.imbalance(model).ratio)
    assert [(layer.name, layer.units, layer.dead) for layer in found.layers] == [
        ("0", 8, 2), ("2", 8, 0), ("4", 3, 0)
    ]  # fmt: skip
    balanced = copy.deepcopy(model)
    pathsgd.balance(balanced, p=4, q=4)
    for layer in found.layers:
        for bits in (8, 4):
            assert layer.loss[bits] == pytest.approx(measure_loss(model, layer.name, bits))
            assert layer.loss_balanced[bits] == pytest.approx(measure_loss(balanced, layer.name, bits))
    assert found.layers[0].loss[4] > 3 * found.layers[0].loss_balanced[4]
    means = (sum(getattr(x, name)[4] for x in found.layers) / 3 for name in ("loss", "loss_balanced"))
    sentence = "{:.3g} times the balanced one; 2 of 19 units dead; int4 error {:.2g}, after balance {:.2g}"
    assert str(found) == "Sequential: mu is " + sentence.format(found.ratio, *means)


def test_the_imbalance_is_what_a_live_unit_was_rescaled_by(model):
    first, second, last = pathsgd.inspect(model).layers
    assert sorted(first.imbalance) == pytest.approx([0] * 5 + [5], abs=1e-6)
    assert first.quantiles == pytest.approx((0, 0, 0, 0, 5), abs=1e-6)
    assert second.quantiles == pytest.approx((0,) * 5, abs=1e-6)
    assert last.quantiles == ()


@pytest.mark.parametrize("build", [encoder, with_batch_norm])
def test_rescaled_copies_lose_the_same_after_balance(build):
    torch.manual_seed(0)
    model, x = build()
    rescaled = copy.deepcopy(model)
    pathsgd.unbalance(rescaled, x)
    before, after = pathsgd.inspect(model, x), pathsgd.inspect(rescaled, x)
    assert after.ratio > 2 * before.ratio
    for one, other in zip(before.layers, after.layers, strict=True):
        assert one.loss_balanced == pytest.approx(other.loss_balanced)
    assert any(a.loss[4] > 2 * b.loss[4] for a, b in zip(after.layers, before.layers, strict=True) if a.loss)


def test_gains_count_with_the_layer_before_them():
    model, x = with_batch_norm()
    pathsgd.balance(model, x)
    pathsgd.rescale(model, x, {("1", 2): 8.0})
    conv, second, last = pathsgd.inspect(model, x).layers
    assert [layer.name for layer in (conv, second, last)] == ["0", "3", "6"], "without rows for 1 and 4"
    assert sorted(conv.imbalance) == pytest.approx([0] * 5 + [3], abs=1e-6)
    assert len(second.imbalance) == 4


def test_batch_norms_that_are_added_up_count_with_both_layers():
    model, x = build(SmallResNet)
    layers = {layer.name: layer for layer in pathsgd.inspect(model, x).layers}
    assert next(iter(layers)) == "stem.0"
    assert list(layers)[-1] == "head"
    tied = [layers[f"stages.1.{name}"].imbalance for name in ("conv2", "shortcut.0")]
    assert len(tied[0]) == layers["stages.1.conv2"].units
    assert tied[0] == tied[1]


def test_a_channel_of_gain_zero_is_dead_before_it():
    model, x = with_batch_norm()
    model[1].weight.data[2] = 0
    assert [layer.dead for layer in pathsgd.inspect(model, x).layers] == [1, 0, 0]


def test_what_has_no_live_path_counts_plainly():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    nn.init.zeros_(model[2].weight)
    first, last = pathsgd.inspect(model).layers
    weight = model[0].weight.detach()
    plain = (weight - round_weight(weight, 4)).square().sum() / weight.square().sum()
    assert first.loss[4] == pytest.approx(plain.item())
    assert (first.dead, last.dead, last.loss) == (8, 0, {})


def test_a_shape_for_which_nothing_can_be_rescaled():
    found = pathsgd.inspect(nn.LSTM(3, 4, batch_first=True), torch.zeros(1, 5, 3))
    assert [layer.imbalance for layer in found.layers] == [()]
    assert found._repr_png_().startswith(b"\x89PNG")


def test_the_figure_is_drawn_without_pyplot(model, monkeypatch):
    found = pathsgd.inspect(model)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    figure = found.draw()
    assert found._repr_png_().startswith(b"\x89PNG")
    left, _ = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["0 · 8", "2 · 8", "4 · 3"]
    assert "2 dead" in [text.get_text() for text in left.texts]
    assert figure.get_suptitle() == str(found)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(pathsgd.PathError, match="pip install matplotlib"):
        found.draw()


def test_many_layers_share_rows():
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(32)]
    found = pathsgd.inspect(nn.Sequential(nn.Linear(4, 4), nn.Sequential(*blocks)))
    assert len(found.layers) == 65
    left, _ = found.draw().axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["0 · 4", "64 x *.*.* · 256"]
