"""Which parameters are on paths with others, and where regions end."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import pathsgd
from support.networks import Transformer, build, dense_gammas
from support.traced import Apply, normalised


@pytest.mark.parametrize(
    "function",
    [F.gelu, torch.sigmoid, torch.tanh, F.relu6, F.silu, F.elu, F.softplus, F.hardtanh, F.glu,
     lambda x: torch.softmax(x, -1), lambda x: F.layer_norm(x, (4,)), lambda x: F.normalize(x),
     lambda x: x * torch.sigmoid(x), lambda x: x.clamp(-1, 1), lambda x: x / x.sum(), torch.exp,
     lambda x: x[:, :2] * x[:, 2:], lambda x: x**3],
)  # fmt: skip
def test_what_is_not_homogeneous_ends_the_region(function):
    model = Apply(function)
    if function is F.glu or model.function(torch.ones(1, 4)).shape[1] == 2:
        model.b = nn.Linear(2, 4)
    graph = pathsgd.trace(model, torch.randn(2, 4))
    assert normalised(graph) == set()
    assert "alone on its paths" in graph.parameters["a.weight"].reason
    assert len(graph.boundaries) >= 1
    assert "Regions end" in str(graph)
    gamma = dense_gammas(model, graph)  # 2 where the function reads a unit twice
    assert all(value.eq(value.flatten()[0]).all() for value in gamma.values())


@pytest.mark.parametrize(
    "function",
    [F.relu, F.leaky_relu, torch.abs, F.rrelu, lambda x: F.threshold(x, 0, 0), lambda x: x.clamp(min=0),
     lambda x: F.dropout(x, 0.5), lambda x: torch.maximum(x, -x), lambda x: x.double().float(),
     lambda x: x.masked_fill(x > 1, 0), lambda x: x.movedim(1, 0).t(), lambda x: x.roll(1, 1),
     lambda x: x.relu_().add_(x), lambda x: x.unbind(1)[0][:, None].repeat(1, 4),
     lambda x: x.reshape(-1, 2, 2).max(2).values.repeat(1, 2), lambda x: x.relu().square()],
)  # fmt: skip
def test_what_is_homogeneous_does_not(function):
    model = Apply(function)
    graph = pathsgd.trace(model, torch.randn(2, 4))
    assert normalised(graph) == set(graph.parameters), str(graph)
    pathsgd.path_norm(model, graph)


def test_values_and_output_projection_share_a_region():
    """Rescaling a value channel and its column of the output projection changes nothing; gamma follows."""
    model, x = build(Transformer)
    graph = pathsgd.trace(model, x)
    before, gamma = model(x).detach(), dense_gammas(model, graph)
    channel = 3
    value_row = 2 * 8 + channel
    pathsgd.rescale(model, graph, {("layer.self_attn.in_proj_weight", value_row): 4.0})
    assert torch.allclose(before, model(x), rtol=1e-10)
    after = dense_gammas(model, graph)
    rows = gamma["layer.self_attn.in_proj_weight"] / after["layer.self_attn.in_proj_weight"]
    columns = after["layer.self_attn.out_proj.weight"] / gamma["layer.self_attn.out_proj.weight"]
    assert torch.allclose(rows[value_row], torch.full((8,), 16.0).double())
    assert torch.allclose(columns[:, channel], torch.full((8,), 16.0).double())
    with pytest.raises(pathsgd.RescaleError, match="cannot be rescaled"):
        pathsgd.rescale(model, graph, {("layer.self_attn.out_proj.weight", 0): 4.0})


def test_queries_are_rescaled_against_keys():
    model, x = build(Transformer)
    before, weight = model(x).detach(), model.layer.self_attn.in_proj_weight
    old = weight.detach().clone()
    pathsgd.rescale(model, x, {("layer.self_attn.in_proj_weight", 3): 4.0})
    assert torch.allclose(before, model(x), rtol=1e-10)
    assert torch.equal(weight[3], 4 * old[3])
    assert torch.equal(weight[8 + 3], old[8 + 3] / 4)
    pathsgd.rescale(model, x, {("layer.self_attn.in_proj_weight", 8 + 3): 4.0})
    assert torch.equal(weight, old)


def test_integers_begin_paths_where_they_become_floats():
    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

        def forward(self, x):
            return self.net(x.float() / 255)

    graph = pathsgd.trace(Pixels(), torch.zeros(2, 4, dtype=torch.uint8))
    assert normalised(graph) == set(graph.parameters), str(graph)


def test_only_the_shape_of_an_ignored_argument_matters():
    """zeros_like and expand_as read nothing of their argument, so its paths do not end there."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x):
            hidden = torch.relu(self.first(x))
            hidden = hidden + torch.zeros_like(hidden) + hidden.expand_as(hidden)
            return self.last(hidden)

    graph = pathsgd.trace(Model(), torch.ones(1, 2))
    assert graph.boundaries == ()
    assert normalised(graph) == set(graph.parameters)


def test_frozen_shared_and_unused_parameters():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.unused = nn.Parameter(torch.ones(2))
            self.c.weight.requires_grad_(False)

        def forward(self, x):
            return self.c(self.b(self.a(x).relu()).relu())

    graph = pathsgd.trace(Odd(), torch.randn(1, 3))
    assert graph.parameters["a.weight"].aliases == ("b.weight",)
    assert graph.parameters["unused"].reason == "not used by the forward pass"
    assert not graph.parameters["c.weight"].trainable
    assert "a.weight = b.weight" in str(graph)
    assert "yes (frozen)" in str(graph)


def test_computed_weights():
    """A pruning mask is a fixed factor on an edge; weight norm and LoRA in one matrix are outside."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    prune.random_unstructured(model[0], "weight", 0.5)
    graph = pathsgd.trace(model, torch.randn(1, 4).double())
    assert normalised(graph) == set(graph.parameters)
    gamma = dense_gammas(model, graph)["0.weight_orig"]
    assert torch.equal(gamma == 0, model[0].weight_mask == 0)
    assert type(model[0].weight) is torch.Tensor

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    parametrizations.weight_norm(model[2])
    graph = pathsgd.trace(model, torch.randn(1, 4))
    reason = graph.parameters["2.parametrizations.weight.original1"].reason
    assert reason.startswith("outside: a weight computed by")
    assert normalised(graph) == {"2.bias", "4.weight", "4.bias"}

    class Lora(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

        def forward(self, x):
            return F.linear(x, self.weight + self.up @ self.down, self.bias)

    graph = pathsgd.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Lora()), torch.randn(1, 4))
    assert graph.parameters["2.weight"].status is pathsgd.ParameterStatus.NORMALISED

    class TwoSteps(Lora):
        def forward(self, x):
            return super(Lora, self).forward(x) + x @ self.down.t() @ self.up.t() * 0.5

    graph = pathsgd.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), TwoSteps()), torch.randn(1, 4))
    assert normalised(graph) == set(graph.parameters)


def stack(activation):
    return nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4), activation, nn.Linear(4, 2))


def transformer(activation):
    layer = nn.TransformerEncoderLayer(4, 2, 16, activation=activation, batch_first=True, norm_first=True)
    return nn.Sequential(layer, nn.LayerNorm(4), nn.Linear(4, 99))


class Gated(nn.Module):
    """The MLP of SwiGLU."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.RMSNorm(4), *(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def convolutions(norm):
    blocks = [module for k in (3, 8, 8) for module in (nn.Conv2d(k, 8, 3), norm(), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32, 2))


@pytest.mark.parametrize(
    ("model", "shape", "cause"),
    [
        (stack(nn.ReLU()), (1, 4), None),
        (stack(nn.Sigmoid()), (1, 4), "sigmoid (32 weights)"),
        (transformer("relu"), (1, 3, 4), None),
        (transformer("gelu"), (1, 3, 4), "gelu (128 weights)"),
        (nn.Sequential(Gated(), nn.RMSNorm(4)), (1, 3, 4), "silu (16 weights)"),
        (convolutions(nn.Identity), (1, 3, 8, 8), None),
        (convolutions(lambda: nn.BatchNorm2d(8)), (1, 3, 8, 8), "batch norm divides by statistics"),
    ],
)
def test_a_warning_if_few_weights_share_a_path(model, shape, cause):
    expected = nullcontext() if cause is None else pytest.warns(UserWarning, match=re.escape(cause))
    with expected:
        pathsgd.PathSGD(model, torch.zeros(shape), lr=0.1)


def test_the_status_of_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1, bias=False)
            self.temperature, self.spare = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2))

        def forward(self, x):
            x = self.second(torch.relu(self.first(x)))
            return self.last(torch.tanh(x * self.temperature.exp()))

    found = pathsgd.trace(Model(), torch.ones(1, 2)).parameters
    status = pathsgd.ParameterStatus
    assert {name: info.status for name, info in found.items()} == {
        **dict.fromkeys(["first.weight", "first.bias", "second.weight", "second.bias"], status.NORMALISED),
        "last.weight": status.ALONE,
        "temperature": status.OUTSIDE,
        "spare": status.UNUSED,
    }
    assert all(bool(info.reason) != info.normalised for info in found.values())
