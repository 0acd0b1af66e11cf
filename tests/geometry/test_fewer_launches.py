"""Convolutions as matrix products and batch norms as one, against the operations they stand for."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch import nn
from torch.autograd import forward_ad

import pathsgd
from benchmarks.networks import ResNet
from pathsgd.geometry import edge_weights, passes
from pathsgd.geometry.extended_float import Arithmetic, ExtendedFloat
from pathsgd.geometry.gamma import measure_gammas
from pathsgd.geometry.operations import convolution
from pathsgd.geometry.operations.channel_norm import adjoin_norm
from pathsgd.geometry.operations.gpu import conv_kernels
from pathsgd.graph.nodes import Conv, Stored, Weight
from support.calls import Calls
from support.networks import DenseNet, PreActivation, SmallResNet, UNet, Vgg, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONVOLUTIONS = {
    "3x3": ((5, 3, 3, 3), (1, 1), (1, 1), (1, 1)),
    "several programs": ((70, 20, 3, 3), (1, 1), (1, 1), (1, 1)),
    "stride": ((5, 3, 3, 2), (2, 3), (1, 0), (1, 1)),
    "dilation": ((2, 4, 3, 3), (1, 2), (2, 2), (2, 1)),
    "one axis": ((5, 3, 7, 1), (1, 1), (3, 0), (1, 1)),
    "pointwise": ((6, 3, 1, 1), (1, 1), (0, 0), (1, 1)),
    "pointwise, stride": ((6, 3, 1, 1), (2, 2), (0, 0), (1, 1)),
    "pointwise, padding": ((6, 3, 1, 1), (1, 1), (1, 0), (1, 1)),
}


@pytest.fixture
def rounding(monkeypatch):
    """Triton's interpreter rounds, where tensor cores cut off."""
    if DEVICE == "cpu":
        monkeypatch.setattr(conv_kernels, "ROUND_UP", tl.constexpr(1.0))


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("shape", "stride", "padding", "dilation"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_products(shape, stride, padding, dilation, layout, monkeypatch):
    """Forward, back to the inputs, and to the weights; here by Triton's interpreter."""
    operation = Conv(Weight(shape, Stored(shape, "weight")), stride, padding, dilation, output_padding=(0, 0))
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.rand(s, generator=generator).to(DEVICE) for s in (shape, (1, shape[1], 9, 8)))
    weight = weight.to(memory_format=layout)
    if shape[3] == 1:  # whose stride torch leaves open
        weight = weight.transpose(2, 3).clone(memory_format=layout).transpose(2, 3)

    monkeypatch.setattr(convolution, "_has_kernel", lambda operation, x, *_: x.dtype == torch.float32)

    def ones_like(value):
        """As one number, wherever it is read."""
        return ExtendedFloat(value.mantissa.new_ones(()).expand_as(value.mantissa))

    def run(dtype):
        plain, into = Arithmetic(2.0, dtype), ExtendedFloat(x.to(dtype))
        y = convolution.conv(plain, operation, into, weight)
        back = convolution.transpose_conv(operation, tuple(x.shape), tuple(y.mantissa.shape))
        ramp = torch.linspace(0.5, 1, y.mantissa.numel(), device=DEVICE).to(dtype)
        gradient = ExtendedFloat(ramp.reshape(y.mantissa.shape))
        flow = convolution.conv(plain, back, gradient, weight)
        by_weight = convolution.conv_weight_adjoint(plain, operation, into, gradient, weight)
        ends = ones_like(into), ones_like(gradient)
        of_ones = convolution.conv_weight_adjoint(plain, operation, *ends, weight)
        return [value.mantissa for value in (y, flow, by_weight, of_ones)]

    found = run(torch.float32)
    for own, expected in zip(found, run(torch.float64), strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-6, atol=0)
    assert found[2].is_contiguous(memory_format=layout)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("weight", [2.0**-58, 2.0**-30, 2.0**18])
def test_products_near_the_ends_of_the_range(weight, monkeypatch):
    """Powers of 2^-116, whose last bits are subnormal, times a large image."""
    operation = Conv(
        Weight((8, 40, 3, 3), Stored((8, 40, 3, 3), "weight")), *[(1, 1)] * 3, output_padding=(0, 0)
    )
    generator = torch.Generator().manual_seed(0)
    weights = torch.empty(8, 40, 3, 3).uniform_(0.5, 1, generator=generator).to(DEVICE) * weight
    x = torch.empty(1, 40, 5, 5).uniform_(0.5, 1, generator=generator).to(DEVICE) * 2.0**60
    monkeypatch.setattr(convolution, "_has_kernel", lambda operation, x, *_: x.dtype == torch.float32)
    found, expected = (
        convolution.conv(Arithmetic(2.0, dtype), operation, ExtendedFloat(x.to(dtype)), weights).mantissa
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 5, 3, 3), (2, 6, 20, 30), (1, 3, 7), (3, 9, 11, 13)], ids=str)
def test_adjoints_of_a_norm(shape):
    generator = torch.Generator().manual_seed(0)
    gradient, x = (torch.rand(shape, generator=generator, dtype=torch.float64).to(DEVICE) for _ in range(2))
    scale = torch.rand(shape[1], *(1,) * (len(shape) - 2), generator=generator, dtype=torch.float64).to(
        DEVICE
    )
    for g in (gradient, gradient.transpose(-1, -2).contiguous().transpose(-1, -2)):
        found = adjoin_norm(g, x, scale)
        over = [0, *range(2, len(shape))]
        expected = g * scale, (g * x).sum(over).reshape(scale.shape), g.sum(over).reshape(scale.shape)
        torch.testing.assert_close(tuple(found), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("kind", [SmallResNet, Vgg])
def test_batch_norms_as_one(kind, p, monkeypatch):
    model, x = build(kind, torch.float64)
    model, x = model.to(DEVICE), x.to(DEVICE)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight[0] = 0  # as some are initialised
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    graph = pathsgd.trace(model, x)
    monkeypatch.setattr(passes, "_gains_by_joining", lambda device: True)
    joined = []
    join = passes.PoweredNetwork.join_norms
    monkeypatch.setattr(
        passes.PoweredNetwork, "join_norms", lambda own: joined.append(join(own)) or joined[-1]
    )
    found = measure_gammas(graph, graph.tensors(model), p)
    monkeypatch.setattr(passes.PoweredNetwork, "join_norms", lambda own: own)
    expected = measure_gammas(graph, graph.tensors(model), p)
    assert len(joined[0].norms) == sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) > 0
    for name, gamma in expected.items():
        torch.testing.assert_close(found[name].dense(), gamma.dense(), rtol=1e-12, atol=0)


class Strides(nn.Module):
    """Convolutions that see different borders of the same images, strides that do not divide them, and a
    transposed one."""

    example = (1, 3, 15, 13)

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 20, 3, padding=1, bias=False)
        self.wide = nn.Conv2d(20, 9, 5, stride=2, padding=2)
        self.dilated = nn.Conv2d(20, 9, 3, stride=(2, 2), padding=(2, 2), dilation=2)
        self.back = nn.ConvTranspose2d(9, 4, 3, stride=2, padding=1, output_padding=1)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (20, 9, 9, 4)))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        first, wide, dilated, back = self.norms
        x = torch.relu(first(self.first(x)))
        x = torch.relu(wide(self.wide(x)) + dilated(self.dilated(x)))
        return self.head(torch.relu(back(self.back(x))).mean((2, 3)))


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("kind", [SmallResNet, Vgg, PreActivation, DenseNet, UNet, Strides])
def test_kernels_together(kind, p, layout, monkeypatch):
    """gamma by all kernels."""
    model, x = build(kind, torch.float64)
    graph = pathsgd.trace(model.to(DEVICE, memory_format=layout), x.to(DEVICE))
    tensors = {name: tensor.float() for name, tensor in graph.tensors(model).items()}
    expected = measure_gammas(graph, {name: tensor.double() for name, tensor in tensors.items()}, p)
    monkeypatch.setattr(passes, "_gains_by_joining", lambda device: True)
    monkeypatch.setattr(edge_weights, "_squares_convolutions", lambda arithmetic, _: arithmetic.p == 2)
    monkeypatch.setattr(
        convolution, "_has_kernel", lambda operation, x, *_: x.dtype == torch.float32 and len(x) == 1
    )
    found = measure_gammas(graph, tensors, p)
    for name, gamma in expected.items():
        # gamma is (a sum over paths)^(2/p): of the sum itself fp32 holds so many digits.
        own, right = (each.dense().double() ** (p / 2) for each in (found[name], gamma))
        torch.testing.assert_close(own, right, rtol=1e-6, atol=0)


class NormOf(nn.Module):
    def __init__(self, model, x):
        super().__init__()
        self.model, self.graph = model, pathsgd.trace(model, x)

    def forward(self):
        return pathsgd.path_norm(self.model, self.graph)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which torch calls itself
def test_forward_mode(monkeypatch):
    """Tangents are not lost in kernels: requires_grad does not tell of them."""
    model, x = build(Vgg, torch.float32)
    norm = NormOf(model.to(DEVICE).requires_grad_(False), x.to(DEVICE))

    def differentiate():
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(p, torch.ones_like(p)) for n, p in norm.named_parameters()}
            return forward_ad.unpack_dual(torch.func.functional_call(norm, duals, ())).tangent

    expected = differentiate()
    monkeypatch.setattr(passes, "_gains_by_joining", lambda device: True)
    for module in (edge_weights, convolution):
        monkeypatch.setattr(module, "has_tensor_cores", lambda device: True)
    torch.testing.assert_close(differentiate(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("with_grad", [False, True])
def test_a_path_norm_takes_little_more_calls_than_a_forward_pass(with_grad, monkeypatch):
    """On a GPU both take as long as they take to call."""
    monkeypatch.setattr(passes, "_gains_by_joining", lambda device: True)
    # In fp64 no kernels of ours are called, of which Triton's interpreter makes many calls.
    model, x = ResNet(width=2, classes=3).eval().double(), torch.ones(1, 3, 32, 32, dtype=torch.float64)
    graph = pathsgd.trace(model, x)
    with torch.set_grad_enabled(with_grad):
        pathsgd.path_norm(model, graph)
        with Calls() as forward:
            model(x)
        with Calls() as norm:
            pathsgd.path_norm(model, graph)
    assert norm.count - norm.detached < 2 * (forward.count - forward.detached)


def test_what_else_is_read_is_not_joined():
    """The product of a norm that is also returned, and weights that are not by channel."""

    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.scale, self.shift = (
                nn.Conv2d(2, 3, 1),
                nn.Parameter(torch.ones(3, 1, 1)),
                nn.Conv2d(2, 3, 1),
            )
            self.bias, self.by_place = nn.Parameter(torch.ones(3, 1, 1)), nn.Parameter(torch.ones(3, 1, 4))

        def forward(self, x):
            scaled = self.conv(x) * self.scale
            return scaled + self.bias, scaled, torch.relu(self.shift(x)) * self.scale + self.by_place

    graph = pathsgd.trace(Read(), torch.ones(1, 2, 4, 4))
    assert graph.folded.graph.channel_norms == {}
