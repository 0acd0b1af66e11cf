"""Never silently wrong: models written to trip the tracer. Whatever it accepts, a rescaling keeps."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from pathsgd.graph.unit_classes import unit_classes_of
from support.networks import dense_gammas
from support.old_torch import needs_torch


@dataclass
class Out:
    logits: torch.Tensor


class Plain:
    def __init__(self, value):
        self.value = value


class Net(nn.Module):
    """h = relu(l1(x)), then whatever the test says."""

    def __init__(self, body):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.gate, self.vector = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(5))
        self.other = nn.Parameter(torch.randn(5))
        self.table, self.mask_maker = nn.Embedding(5, 3), nn.Linear(5, 5)
        self.register_buffer("prev", torch.zeros(1, 5))
        self.body = body

    def forward(self, x):
        return self.body(self, x, F.relu(self.l1(x)))


def bool_mask(net, x, h):
    mask = torch.zeros(5, dtype=torch.bool)
    mask[:2] = True
    return net.l2(h) + net.l3(h * mask)


def stateful(net, x, h):
    y = net.l2(h) + net.l3(net.prev)
    net.prev.copy_(h.detach()[:1])
    return y


def attention_bias(net, x, h):
    bias = net.mask_maker(h)[:, None, None, :1]
    q = h[:, None, None, :]
    return net.l2(F.scaled_dot_product_attention(q, q, q, attn_mask=bias)).flatten(1)


BODIES = {
    "returns a weight": lambda n, x, h: (n.l2(h), n.l1.weight),
    "returns a function of a weight": lambda n, x, h: (n.l2(h), (n.l1.weight**2).sum()),
    "returns a dataclass": lambda n, x, h: Out(n.l2(h)),
    "returns an object": lambda n, x, h: (n.l2(h), Plain(h)),
    "learned attention bias": attention_bias,
    "layer norm with a computed bias": lambda n, x, h: n.l2(
        F.layer_norm(n.l1(x), (5,), n.vector, n.other + n.vector)
    ),
    "layer norm with a computed weight": lambda n, x, h: n.l2(
        F.layer_norm(n.l1(x), (5,), n.mask_maker(h)[0])
    ),
    "mask from a weight": lambda n, x, h: n.l2(h.masked_fill(n.l1.weight[:, 0] > 0.1, 0)),
    "mask that broadcasts": lambda n, x, h: n.l2(h[:, None].masked_fill(torch.eye(5).bool(), 0)),
    "index from a weight": lambda n, x, h: n.l2(h) + n.table(n.l1.weight.sum(1).argmax()),
    "cast to integers": lambda n, x, h: n.l2((8 * n.l1(x)).long().double()),
    "cast to bool": lambda n, x, h: n.l2(n.l1(x).bool().double()),
    "rounded division": lambda n, x, h: n.l2(torch.div(n.l1(x), 0.1, rounding_mode="floor")),
    "a mask filled in place": bool_mask,
    "state in a buffer": stateful,
    "an unused layer": lambda n, x, h: (n.l3(h), n.l2(h))[1],
    "a shared scalar gate": lambda n, x, h: n.l2(F.relu(n.gate * h + n.mask_maker(h))),
    "a product with an item": lambda n, x, h: n.l2(h * n.gate.item()),
    "a factor of two constants": lambda n, x, h: n.l2(h * (torch.ones((), dtype=torch.float64) * 3)),
    "channels shuffled in 3d": lambda n, x, h: n.l2(
        F.channel_shuffle(h[:, :4, None, None, None].expand(-1, -1, 2, 1, 1), 2)
        .mean(2).flatten(1).repeat(1, 2)[:, :5]
    ),
    "a transpose of three axes": lambda n, x, h: n.l2(h[None, :, :].permute(2, 1, 0).permute(2, 1, 0)[0]),
    "zeros only": lambda n, x, h: n.l2(h) + torch.maximum(torch.zeros(3), torch.zeros(3)).double(),
    "softmax of a vector": lambda n, x, h: n.l2(h) * torch.softmax(n.other, 0).sum(),
    "softmax times a vector": lambda n, x, h: n.l2(
        torch.softmax(h, -1) @ n.mask_maker(h).mean(0)[:, None].expand(5, 5)
    ),
    "a parameter as activation and weight": lambda n, x, h: n.l2(h * n.vector) + n.l3(n.vector.relu()),
    "squares and gates": lambda n, x, h: n.l2(h * h) + n.l3(F.relu(n.mask_maker(h)) * h),
    "a residual of a residual": lambda n, x, h: n.l2(h + n.mask_maker(h + F.relu(n.mask_maker(h)))),
}  # fmt: skip


def outputs(model, x):
    from pathsgd.graph.export import tensors_in

    return [t.detach().clone() for t in tensors_in(model(x))]


@pytest.mark.filterwarnings("ignore:no unit of Net can be rescaled")
@pytest.mark.parametrize("name", BODIES)
def test_whatever_is_accepted_keeps_its_function(name):
    torch.manual_seed(3)
    model = Net(BODIES[name]).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    graph = pathsgd.trace(model, x)
    state = copy.deepcopy(model.state_dict())
    before = outputs(model, x) + outputs(model, x)
    model.load_state_dict(state)
    units = unit_classes_of(graph)
    if units.count > 1:
        pathsgd.unbalance(model, graph, units=3 * units.count)
    pathsgd.balance(model, graph)
    after = outputs(model, x) + outputs(model, x)
    for a, b in zip(before, after, strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(a.abs().max().item(), 1e-300)


@pytest.mark.parametrize(
    ("body", "times"),
    [
        (lambda n, x, h: n.l2(h), 1),
        (lambda n, x, h: n.l2(h * (torch.ones((), dtype=torch.float64) * 3)), 3),
        (lambda n, x, h: n.l2(h[:, None].masked_fill(torch.zeros(3, 5).bool(), 0)), 3),
    ],
)
def test_constants_and_broadcasts_count_as_they_should(body, times):
    """phi_1 with unit weights and no biases is the number of paths: 4 * 5 * 3, and what the body adds."""
    model = Net(body).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    for layer in (model.l1, model.l2):
        nn.init.zeros_(layer.bias)
    found = pathsgd.path_norm(model, torch.ones(1, 4, dtype=torch.float64), p=1).item()
    assert found == 60 * times


def test_a_constant_cast_to_integers_is_not_measured_as_if_it_were_not():
    model = Net(lambda n, x, h: n.l2(h * torch.full((5,), 1.7).long())).double()
    with pytest.raises(pathsgd.PathError, match="cast to integers"):
        pathsgd.path_norm(model, torch.ones(1, 4, dtype=torch.float64), p=1)


@pytest.mark.parametrize(("size", "options"), [(26, {"size": 46}), (16, {"scale_factor": 1.3})])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_upsampling_takes_the_entries_torch_takes(size, options, mode):
    """The path norm of each output is the weight of the one entry it copies."""

    class Resize(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv1d(1, 1, 1, bias=False)
            self.places = nn.Parameter(torch.arange(1.0, size + 1))

        def forward(self, x):
            return F.interpolate(self.a(x) * self.places, mode=mode, **options)

    model = Resize()
    nn.init.ones_(model.a.weight)
    (found,) = pathsgd.path_norm(model, torch.ones(1, 1, size), p=1, per_output=True)
    expected = F.interpolate(model.places.detach()[None, None], mode=mode, **options)
    assert torch.equal(found.detach(), expected)


class Loop(nn.Module):
    """A recurrence over axis 0, written by hand: that axis is no batch."""

    def __init__(self):
        super().__init__()
        self.into, self.back, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = torch.zeros(5, dtype=x.dtype)
        for t in range(x.shape[0]):
            h = F.relu(self.into(x[t]) + self.back(h))
        return self.out(h)


def test_an_axis_the_code_depends_on_is_not_cut():
    time_first = nn.Sequential(nn.RNN(4, 5, nonlinearity="relu"), Last(), nn.Linear(5, 3))
    branching = Net(lambda n, x, h: n.l2(F.gelu(h)) if len(x) > 1 else n.l2(h))
    cases = [(Loop(), (3, 2, 4)), (Loop(), (3, 4)), (time_first, (3, 1, 4)), (branching, (3, 4))]
    for model, shape in cases:
        model.double()
        x = torch.randn(shape, dtype=torch.float64)
        graph = pathsgd.trace(model, x)
        assert "depends on the size of axis 0" in str(graph)
        before = model(x).detach()
        if model is branching:
            assert unit_classes_of(graph).count == 1
            continue
        pathsgd.unbalance(model, graph, units=9)
        assert torch.allclose(model(x), before, rtol=1e-10)


class Last(nn.Module):
    def forward(self, x):
        return x[0]


def test_memory_that_is_shared_is_refused():
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight.data = model[0].weight.data
    with pytest.raises(pathsgd.TraceError, match=r"'0.weight' and '2.weight' share memory"):
        pathsgd.trace(model)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model.register_buffer("kept", model[0].weight.data)
    with pytest.raises(pathsgd.TraceError, match="share memory"):
        pathsgd.trace(model, torch.randn(1, 5))
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[0].bias = nn.Parameter(torch.zeros(1).expand(5))
    with pytest.raises(pathsgd.TraceError, match=r"'0.bias' is an expanded tensor"):
        pathsgd.trace(model)


def test_factors_that_underflow_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    model[2].weight.data.fill_(1e-10)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(pathsgd.RescaleError, match="out of the range"):
        pathsgd.rescale(model, None, {("0", 0): 1e32})
    assert all(map(torch.equal, before, model.parameters()))


def test_containers_are_put_back():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.cache = nn.Linear(2, 2), {}

        def forward(self, x):
            self.cache["last"] = self.a(x)
            return self.cache["last"]

    model = Caching()
    pathsgd.trace(model, torch.ones(1, 2))
    assert model.cache == {}


def test_reports_are_honest_about_what_is_read():
    class Gemma(nn.Module):
        def __init__(self):
            super().__init__()
            self.g, self.a = nn.Parameter(torch.zeros(4)), nn.Linear(4, 2)

        def forward(self, x):
            return self.a(F.rms_norm(x, (4,), self.g + 1))

    info = pathsgd.trace(Gemma(), torch.ones(1, 4)).parameters["g"]
    assert (info.status, info.roles) == (pathsgd.ParameterStatus.NORMALISED, ("norm weight",))
    bag = nn.Sequential(nn.EmbeddingBag(5, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = pathsgd.trace(bag, torch.zeros(2, 3, dtype=torch.long))
    assert graph.parameters["0.weight"].status is pathsgd.ParameterStatus.NORMALISED
    assert "2.weight" in dense_gammas(bag, graph)


def test_one_module_under_two_names():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
            self.same = self.norm

        def forward(self, x):
            return self.same(self.a(self.norm(self.a(x)).relu()))

    dense_gammas(Twice(), torch.randn(4, 3))


@pytest.mark.parametrize("seed", range(10))
def test_balance_of_residual_streams_with_large_gain(seed):
    """Without biases a circle of gain over one has no constant term to betray it."""

    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.l0, self.l1, self.l2 = (nn.Linear(2, 2, bias=False) for _ in range(3))

        def forward(self, x):
            h = F.relu(self.l0(x))
            return self.l2(h + F.relu(self.l1(h)))

    torch.manual_seed(seed)
    model = Stream().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.l1.weight.data *= 4
    x = torch.randn(3, 2, dtype=torch.float64)
    start = pathsgd.group_norm(model, x).item()
    reached = pathsgd.balance(model, x, q=math.inf)
    assert reached <= start * (1 + 1e-12)
    generator = torch.Generator().manual_seed(seed)
    graph = pathsgd.trace(model, x)
    for _ in range(100):
        other = copy.deepcopy(model)
        size = 10 ** -(4 * torch.rand((), generator=generator).item())
        factors = torch.exp(size * torch.randn(2, 2, generator=generator, dtype=torch.float64))
        owners = unit_classes_of(graph).owners
        free = {k: f for k, f in zip(("l0", "l1"), factors, strict=True) if owners[k].all()}
        if len(free) == 2 and torch.equal(owners["l0"], owners["l1"]):
            free.pop("l1")
        pathsgd.rescale(other, graph, free)
        assert pathsgd.group_norm(other, graph).item() >= reached * (1 - 1e-12)


@needs_torch(2, 9, "a precision for each kind of operator")
@pytest.mark.parametrize("setting", ["conv", "rnn"])
@pytest.mark.parametrize("old_setting", [False, True])
def test_precision_settings_of_one_kind_do_not_stop_a_trace(setting, old_setting):
    """torch.export asks for one TF32 setting of cudnn; there may be two."""
    torch._C._set_cudnn_allow_tf32(old_setting)
    own = getattr(torch.backends.cudnn, setting)
    before = own.fp32_precision
    own.fp32_precision = "ieee"
    try:
        graph = pathsgd.trace(
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3)), torch.zeros(1, 1, 8, 8)
        )
        assert own.fp32_precision == "ieee"
    finally:
        own.fp32_precision = before
        torch._C._set_cudnn_allow_tf32(True)
    assert all(info.normalised for info in graph.parameters.values())
