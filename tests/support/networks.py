"""Networks of the kinds people train, small: what rescaling, balancing and reports are tried on."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

import pathsgd
from benchmarks.networks import ResNet


class Mlp(nn.Sequential):
    example = (3, 6)

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 4))


class Vgg(nn.Sequential):
    example = (2, 3, 12, 12)

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(True), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(True),
            nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(16, 5),
        )  # fmt: skip


class SmallResNet(ResNet):
    example = (2, 3, 24, 24)

    def __init__(self):
        super().__init__(width=4, blocks=(1, 2, 1), classes=5)


class PreActivation(nn.Module):
    """A residual stream without normalisation: its units depend on each other in a circle."""

    example = (3, 5)

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.up = nn.ModuleList(nn.Linear(6, 7) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(7, 6) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(F.relu(x))))
        return self.head(F.relu(x))


class DenseNet(nn.Module):
    example = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 + 3 * k) for k in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(4 + 3 * k, 3, 3, padding=1) for k in range(3))
        self.transition, self.head = nn.Conv2d(13, 6, 1), nn.Linear(6 * 16, 4)

    def forward(self, x):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        x = F.avg_pool2d(F.relu(self.transition(x)), 2)
        return self.head(x.flatten(1))


class UNet(nn.Module):
    example = (2, 3, 12, 12)

    def __init__(self):
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skip = F.relu(self.enter(x))
        x = F.relu(self.down(F.max_pool2d(skip, 2)))
        x = self.up(F.relu(self.bottom(x)))
        return self.last(F.relu(self.out(torch.cat([skip, x], 1))))


class Recurrent(nn.Module):
    example = (2, 4, 3)

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 4, 2, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Transformer(nn.Module):
    """Attention and a ReLU MLP, pre-norm: values and output projection, and the MLP, are regions."""

    example = (2, 5, 8)

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x))


class Biased(nn.Sequential):
    """A convolution's bias before batch norm: its gradient is zero, but for rounding."""

    example = (8, 2, 6, 6)

    def __init__(self):
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip


class Convolutions(nn.Sequential):
    """Grouped, depthwise, transposed, with batch norm; more entries than a program goes over at a time."""

    example = (2, 3, 4, 4)

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 9, 3, padding=1), nn.BatchNorm2d(9), nn.ReLU(),
            nn.Conv2d(9, 60, 3, padding=1, groups=3, bias=False), nn.ReLU(),
            nn.Conv2d(60, 60, 3, padding=1, groups=60), nn.ReLU(), nn.ConvTranspose2d(60, 20, 2),
        )  # fmt: skip


class Packed(nn.Module):
    """Queries, keys and values in one matrix, once as rows and once, transposed, as columns; an embedding."""

    example = (2, 4, 6)

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 4, 6))
        self.rows = nn.Linear(6, 18)
        self.columns = nn.Parameter(torch.randn(6, 18))
        self.shift = nn.Parameter(torch.randn(18))
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = x + self.positions
        q, k, v = self.rows(x).chunk(3, -1)
        x = F.scaled_dot_product_attention(q, k, v)
        q, k, v = (x @ self.columns + self.shift).chunk(3, -1)
        return self.head(self.scale * F.scaled_dot_product_attention(q, k, v)).mean(1)


NETWORKS = [Mlp, Vgg, SmallResNet, PreActivation, DenseNet, UNet, Recurrent, Transformer]


def build(network, dtype=torch.float64):
    """(model, example): random weights, biases and running statistics, in eval mode."""
    torch.manual_seed(sum(map(ord, network.__name__)))
    model = network().to(dtype).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight), nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return model, torch.randn(network.example, dtype=dtype)


@functools.cache
def traced(network, dtype=torch.float64):
    """The graph of ``build(network, dtype)``: it is the same for every model of a kind, and to trace one
    takes longer than most tests. Of batch one, since any other is traced twice."""
    with torch.random.fork_rng(devices=[]):
        model, x = build(network, dtype)
    return pathsgd.trace(model, x[:1])


def dense_gammas(*arguments, **options):
    """pathsgd.gammas with every gamma as a tensor of its parameter's shape."""
    return {name: gamma.dense() for name, gamma in pathsgd.gammas(*arguments, **options).items()}


class Products(nn.Module):
    """Products of units that lead on by themselves as well, and keys against queries without a softmax."""

    def __init__(self, attends):
        super().__init__()
        self.attends = attends
        self.a, self.q, self.k, self.v, self.b = (nn.Linear(n, 6) for n in (3, 6, 6, 6, 6))

    def forward(self, x):
        h = self.a(x).relu()
        q, k, v = self.q(h), self.k(h), self.v(h)
        return self.b((q @ k.mT).relu() @ v if self.attends else v + 0.3 * q * k)
