"""The networks every fast path is checked on: each written twice, for torch and for the oracle.

``forward`` is the network; ``unroll`` writes the same network down edge by edge, so that brute-force
enumeration of its paths can judge the library. They are small enough for that and share nothing.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from support.unroll import Unroller, parameters


class Case(nn.Module):
    """One network. ``shape`` is that of an input without its batch axis."""

    shape: tuple[int, ...] = (3,)
    dtype = torch.float64

    def example(self, batch=3):
        return torch.randn(batch, *self.shape, dtype=self.dtype)

    def unroll(self, net, w, x):
        raise AssertionError("every case has an unroll")

    def oracle(self):
        """(unroller, dag) of the network as its parameters stand now."""
        net = Unroller()
        outputs = self.unroll(net, parameters(self), net.input(self.shape))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return net, net.dag(*outputs)


class Mlp(Case):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))

    def unroll(self, net, w, x):
        x = net.relu(net.linear(x, w["a.weight"], w["a.bias"]))
        x = net.relu(net.linear(x, w["b.weight"], w["b.bias"]))
        return net.linear(x, w["c.weight"], w["c.bias"])


class Activations(Case):
    """Leaky ReLU, PReLU, abs, squared weights by hand, clamp and dropout, in place where torch can."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 2)
        self.slope = nn.PReLU(4, init=0.3)
        self.relu = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x):
        x = F.dropout(self.relu(self.a(x)).abs(), 0.5, self.training)
        x = self.slope(self.b(x))
        return self.c(x.clamp(min=0).relu_())

    def unroll(self, net, w, x):
        x = net.linear(x, w["a.weight"], w["a.bias"])
        x = net.prelu(net.linear(x, w["b.weight"]), w["slope.weight"])
        return net.linear(x, w["c.weight"], w["c.bias"])


class Maxout(Case):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(2, 4)

    def forward(self, x):
        x = self.a(x).view(-1, 2, 3).amax(2)
        x = self.b(x).unflatten(1, (2, 2))
        return torch.maximum(x[:, 0], x[:, 1])

    def unroll(self, net, w, x):
        x = net.sum(net.linear(x, w["a.weight"], w["a.bias"]).reshape(2, 3), 1)
        x = net.linear(x, w["b.weight"], w["b.bias"]).reshape(2, 2)
        return net.add(x[0], x[1])


class Signs(Case):
    """Subtraction, negation, constants and division act through absolute values."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("gain", torch.tensor([0.5, -2.0, 3.0]))

    def forward(self, x):
        x = self.a(x) - 2 * self.b(x)
        return self.c((-x * self.gain / 4).relu() - 0.5)

    def unroll(self, net, w, x):
        a = net.linear(x, w["a.weight"], w["a.bias"])
        b = net.multiply(net.linear(x, w["b.weight"], w["b.bias"]), 2.0)
        x = net.relu(net.multiply(net.add(a, b, signs=[1, -1]), -self.gain.numpy() / 4))
        half = net.multiply(np.array([net.one()] * 3, dtype=object), -0.5)
        return net.linear(net.add(x, half), w["c.weight"], w["c.bias"])


class ConvPool(Case):
    shape = (2, 5, 5)

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 2)
        self.pool, self.c = nn.MaxPool2d(2, stride=1), nn.Linear(2, 2)

    def forward(self, x):
        x = self.pool(F.relu(self.a(x), inplace=True))
        x = F.avg_pool2d(self.b(x).relu(), 3)
        return self.c(x.flatten(1))

    def unroll(self, net, w, x):
        x = net.max_pool(net.relu(net.conv(x, w["a.weight"], w["a.bias"], padding=1)), 2, stride=1)
        x = net.relu(net.conv(x, w["b.weight"], w["b.bias"]))
        return net.linear(net.avg_pool(x, 3).reshape(-1), w["c.weight"], w["c.bias"])


class Strided(Case):
    """Strides, dilation, groups, and average pooling that counts or ignores its padding."""

    shape = (4, 7, 7)

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, stride=2, padding=2, dilation=2, groups=2)
        self.b = nn.Conv2d(4, 2, (1, 3), padding=(0, 1), bias=False)

    def forward(self, x):
        x = F.avg_pool2d(self.a(x).relu(), 2, stride=2, padding=1, count_include_pad=False)
        x = F.avg_pool2d(self.b(x), 3, stride=2, padding=1, ceil_mode=True)
        return F.adaptive_max_pool2d(x, 1)

    def unroll(self, net, w, x):
        x = net.conv(x, w["a.weight"], w["a.bias"], stride=2, padding=2, dilation=2, groups=2)
        x = net.avg_pool(net.relu(x), 2, stride=2, padding=1, count_include_pad=False)
        x = net.conv(x, w["b.weight"], padding=(0, 1))
        x = net.avg_pool(x, 3, stride=2, padding=1, ceil_mode=True)
        return net.adaptive_max_pool(x, 1)


class Conv1d3d(Case):
    shape = (2, 6)

    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(2, 4, 2, padding="same", padding_mode="zeros")
        self.b = nn.Conv3d(1, 2, 2)

    def forward(self, x):
        x = F.max_pool1d(self.a(x).relu(), 3, stride=2, dilation=1)
        return self.b(x.reshape(-1, 1, 2, 2, 2)).mean((2, 3, 4))

    def unroll(self, net, w, x):
        nothing = net.multiply(np.array([[net.one()]] * 2, dtype=object), 0.0)
        x = net.conv(np.concatenate([x, nothing], 1), w["a.weight"], w["a.bias"])
        x = net.max_pool(net.relu(x), 3, stride=2)
        x = net.conv(x.reshape(1, 2, 2, 2), w["b.weight"], w["b.bias"])
        return net.mean(x, (1, 2, 3))


class Transposed(Case):
    """Transposed convolutions, with groups and output padding, also as long as a stride, and uneven adaptive
    pooling."""

    shape = (4, 3, 3)

    def __init__(self):
        super().__init__()
        self.a = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.b = nn.ConvTranspose2d(4, 1, 2, bias=False, dilation=2, output_padding=1)

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.b(self.a(x).relu()), (3, 2))

    def unroll(self, net, w, x):
        x = net.conv_transpose(x, w["a.weight"], w["a.bias"], stride=2, padding=1, output_padding=1, groups=2)
        x = net.conv_transpose(net.relu(x), w["b.weight"], dilation=2, output_padding=1)
        return net.adaptive_avg_pool(x, (3, 2))


class BatchNorm(Case):
    shape = (2, 3, 3)

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 3, 2, bias=False), nn.BatchNorm2d(3)
        self.b, self.last = nn.Linear(12, 2), nn.BatchNorm1d(2, affine=False)
        for module in (self.norm, self.last):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
        nn.init.normal_(self.norm.weight), nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.last(self.b(self.norm(self.a(x)).relu_().flatten(1)))

    def unroll(self, net, w, x):
        stats = self.norm.running_mean, self.norm.running_var
        x = net.batch_norm(net.conv(x, w["a.weight"]), w["norm.weight"], w["norm.bias"], *stats)
        x = net.linear(net.relu(x).reshape(-1), w["b.weight"], w["b.bias"])
        x = net.batch_norm(x.reshape(2, 1), None, None, self.last.running_mean, self.last.running_var)
        return x.reshape(2)


class Residual(Case):
    """Two blocks on a stream, the second with a projection: pre-activation and strided shortcut."""

    shape = (2, 4, 4)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 2, 1)
        self.a, self.b = nn.Conv2d(2, 2, 2, padding=1), nn.Conv2d(2, 2, 2)
        self.c, self.short = nn.Conv2d(2, 2, 2, stride=2), nn.Conv2d(2, 2, 1, stride=2, bias=False)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.b(self.a(x.relu()).relu())
        x = self.c(x.relu()) + self.short(x)
        return F.adaptive_avg_pool2d(x, 1).flatten(1)

    def unroll(self, net, w, x):
        x = net.conv(x, w["stem.weight"], w["stem.bias"])
        h = net.relu(net.conv(net.relu(x), w["a.weight"], w["a.bias"], padding=1))
        x = net.add(x, net.conv(h, w["b.weight"], w["b.bias"]))
        h = net.conv(net.relu(x), w["c.weight"], w["c.bias"], stride=2)
        x = net.add(h, net.conv(x, w["short.weight"], stride=2))
        return net.adaptive_avg_pool(x, 1).reshape(-1)


class Concatenated(Case):
    """A dense block, then pieces of it taken apart again by slicing, splitting and permuting."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 2), nn.Linear(5, 4), nn.Linear(2, 2)

    def forward(self, x):
        x = torch.cat([x, self.a(x).relu()], 1)
        left, right = self.b(x).chunk(2, 1)
        x = torch.stack([left, right], 2).transpose(1, 2)[:, 1:, ::1]
        return self.c(x[:, 0]), left[..., 1]

    def unroll(self, net, w, x):
        x = np.concatenate([x, net.relu(net.linear(x, w["a.weight"], w["a.bias"]))])
        x = net.linear(x, w["b.weight"], w["b.bias"])
        return net.linear(x[2:], w["c.weight"], w["c.bias"]), x[1:2]


class Tied(Case):
    """One matrix in two layers of a path, and once more transposed."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        x = self.b(self.a(x).relu()).relu()
        return x @ self.a.weight

    def unroll(self, net, w, x):
        x = net.relu(net.linear(x, w["a.weight"], w["a.bias"]))
        x = net.relu(net.linear(x, w["a.weight"]))
        return net.linear(x, w["a.weight"].T)


class Recurrent(Case):
    """nn.RNN, two layers and two directions, which export keeps as one operator."""

    shape = (2, 1)

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, 2, 2, nonlinearity="relu", batch_first=True, bidirectional=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        outputs, last = self.rnn(x)
        return self.out(outputs), last.transpose(0, 1)

    def unroll(self, net, w, x):
        finals = []
        for layer in range(2):
            directions = []
            for suffix in ("", "_reverse"):
                names = [
                    f"rnn.{n}_l{layer}{suffix}" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                ]
                w_ih, w_hh, b_ih, b_hh = (w[name] for name in names)
                order = list(range(len(x)))[:: -1 if suffix else 1]
                h, states = None, {}
                for t in order:
                    parts = [net.shift_param(net.linear(x[t], w_ih, b_ih), b_hh)]
                    parts += [] if h is None else [net.linear(h, w_hh)]
                    h = states[t] = net.relu(net.add(*parts))
                directions.append(np.stack([states[t] for t in range(len(x))]))
                finals.append(h)
            x = np.concatenate(directions, 1)
        return net.linear(x, w["out.weight"], w["out.bias"]), np.stack(finals)


class ByHand(Case):
    """A recurrence and products written with bare parameters: views, masks, scalars, matmul."""

    shape = (3, 2)

    def __init__(self):
        super().__init__()
        self.w_in, self.w = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3, 3))
        self.b, self.gain = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(()))
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("mask", torch.tensor([[1.0, 0, 1], [0.5, 1, 1], [1, -1, 0]]))

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 3)
        for t in range(x.shape[1]):
            h = (x[:, t] @ self.w_in + h @ (self.w * self.mask).t() + self.b).relu()
        return (h * self.scale) @ self.w[:, :2] * self.gain

    def unroll(self, net, w, x):
        mask = self.mask.numpy()
        masked = np.array([[w["w"][o, i].times(mask[o, i]) for i in range(3)] for o in range(3)])
        h = None
        for t in range(3):
            y = net.linear(x[t], w["w_in"].T)
            y = y if h is None else net.add(y, net.linear(h, masked))
            h = net.relu(net.shift_param(y, w["b"]))
        y = net.linear(net.multiply_by_parameter(h, w["scale"]), w["w"][:, :2].T)
        return net.multiply_by_parameter(y, w["gain"])


class Resized(Case):
    """Padding, nearest and bilinear upsampling, pixel shuffle, flips."""

    shape = (1, 2, 3)

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 2), nn.Conv2d(1, 1, 2, bias=False)

    def forward(self, x):
        x = self.a(F.pad(x, (1, 0, 0, 1))).relu()
        x = F.pixel_shuffle(x, 2).flip(3)
        x = self.b(x)
        x = F.interpolate(x, scale_factor=2, mode="nearest")[..., :2, :2]
        x = F.pad(x, (1, 1, 0, 0), mode="reflect")
        return F.interpolate(x, size=(3, 4), mode="bilinear", align_corners=False)

    def unroll(self, net, w, x):
        nothing = net.multiply(np.array(net.one(), dtype=object), 0.0)
        padded = np.full((1, 3, 4), nothing[()], dtype=object)
        padded[:, :2, 1:] = x
        x = net.relu(net.conv(padded, w["a.weight"], w["a.bias"]))
        x = x.reshape(1, 2, 2, 2, 3).transpose(0, 3, 1, 4, 2).reshape(1, 4, 6)[..., ::-1]
        x = net.conv(x, w["b.weight"])
        x = x.repeat(2, 1).repeat(2, 2)[..., :2, :2]
        x = x[..., [1, 0, 1, 0]]
        # Bilinear from 2 rows to 3: (row 0), (half of each), (row 1); 4 columns stay 4 columns.
        rows = np.array([[1, 0], [0.5, 0.5], [0, 1]])
        return net.linear(x.transpose(0, 2, 1), rows).transpose(0, 2, 1)


class Embedded(Case):
    """Tokens behind a learned first one, positions as a learned constant, a linear layer everywhere."""

    shape = (2,)
    dtype = torch.int64

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(3, 2), nn.Linear(2, 2)
        self.first, self.places = nn.Parameter(torch.randn(1, 1, 2)), nn.Parameter(torch.randn(3, 2))

    def example(self, batch=3):
        return torch.zeros(batch, *self.shape, dtype=torch.int64)

    def forward(self, tokens):
        x = torch.cat([self.first.expand(len(tokens), -1, -1), self.table(tokens)], 1)
        return self.out((x + self.places).relu())

    def oracle(self):
        net = Unroller()
        w = parameters(self)
        x = net.embedding(net.input((2, 3)), w["table.weight"])
        first = net.multiply_by_parameter(np.full((1, 2), net.one(), dtype=object), w["first"][0])
        x = net.relu(net.shift_param(np.concatenate([first, x]), w["places"]))
        return net, net.dag(net.linear(x, w["out.weight"], w["out.bias"]))


CASES = [
    Mlp, Activations, Maxout, Signs, ConvPool, Strided, Conv1d3d, Transposed, BatchNorm, Residual,
    Concatenated, Tied, Recurrent, ByHand, Resized, Embedded,
]  # fmt: skip
RESCALABLE = [case for case in CASES if case not in (Signs, Tied, Recurrent, ByHand)]
"""Those that have units to rescale."""


def build(case):
    """A case with random weights of both signs, some of them zero, in fp64."""
    torch.manual_seed(sum(map(ord, case.__name__)))
    model = case().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if case is Mlp:
        # A dead unit and a pruned weight.
        with torch.no_grad():
            model.a.weight[1], model.a.bias[1], model.b.weight[0, 2] = 0, 0, 0
    return model


@functools.cache
def traced(case):
    """The graph of a case: tracing takes longer than a test."""
    model = build(case)
    return pathsgd.trace(model, model.example())
