"""replace_relu6: units behind a ReLU6 can be rescaled, and the function stays."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pathsgd
from benchmarks.league.deep_networks import mobilenet_v1
from pathsgd import PathError


def build():
    """The first seven layers of MobileNetV1, whose signals are clipped in many places, and an input."""
    torch.manual_seed(0)
    model = mobilenet_v1()[:21].double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 1, 8)
    return model, torch.randn(2, 3, 32, 32, dtype=torch.float64)


def test_the_function_and_the_mode_stay():
    model, x = build()
    before = model.eval()(x)
    replaced = copy.deepcopy(model).train()
    pathsgd.replace_relu6(replaced, x)
    assert all(module.training for module in replaced.modules())
    assert not any(isinstance(module, nn.ReLU6) for module in replaced.modules())
    assert torch.equal(replaced.eval()(x), before)
    relu = copy.deepcopy(model)
    for name, module in list(relu.named_modules()):
        if isinstance(module, nn.ReLU6):
            relu.set_submodule(name, nn.ReLU())
    assert not torch.allclose(relu(x), before)


def test_its_units_are_balanced_with_their_bounds():
    model, x = build()
    model.eval()
    pathsgd.replace_relu6(model, x)
    rescaled = copy.deepcopy(model)
    pathsgd.unbalance(rescaled, x, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(rescaled[2].bound, model[2].bound)
    before = model(x)
    for each in (model, rescaled):
        pathsgd.balance(each, x)
        torch.testing.assert_close(each(x), before, rtol=1e-9, atol=1e-11)
    for a, b in zip(model.parameters(), rescaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_one_module_in_two_places():
    class Twice(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, width), nn.Linear(width, 2)
            self.act = nn.ReLU6()

        def forward(self, x):
            return self.c(self.act(self.b(self.act(self.a(x)))))

    x = torch.randn(5, 3) * 30
    model = Twice(4)
    before = model(x)
    pathsgd.replace_relu6(model, x)
    pathsgd.unbalance(model, x, factor=4.0, powers_of_two=True)
    assert torch.equal(model(x), before)
    with pytest.raises(PathError, match="of 3 axes"):
        pathsgd.replace_relu6(nn.Sequential(nn.Linear(3, 4), nn.ReLU6()), x[None])
    with pytest.raises(PathError, match=r"'act' clips \[4, 5\] channels"):
        pathsgd.replace_relu6(Twice(5), x)


def test_where_the_function_would_change_the_model_is_left():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(3, 4), nn.ReLU6(inplace=True), nn.Linear(4, 2)

        def forward(self, x):
            h = self.a(x)
            self.act(h)  # for what it writes
            return self.b(h)

    hooked = nn.Sequential(nn.Linear(3, 4), nn.ReLU6(), nn.Linear(4, 2))
    hooked[1].register_forward_hook(lambda module, args, result: 2 * result)
    x = torch.randn(5, 3) * 30
    for model in (InPlace(), hooked):
        before = model(x)
        with pytest.raises(PathError, match="the function would change"):
            pathsgd.replace_relu6(model, x)
        assert torch.equal(model(x), before)
        assert any(type(module) is nn.ReLU6 for module in model.modules())
