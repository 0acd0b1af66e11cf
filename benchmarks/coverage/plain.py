"""Networks written in torch alone, small: layers of torch, and odd ways to write a forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 5))


class ReLU6Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 12, 3), nn.ReLU6(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 16), nn.ReLU6(), nn.Linear(16, 5),
        )  # fmt: skip


class Recurrent(nn.Module):
    """Two recurrent layers of torch and a head."""

    def __init__(self, layer: type[nn.RNNBase], **options):
        super().__init__()
        self.layers, self.head = layer(6, 16, 2, batch_first=True, **options), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Transformer(32, 4, 2, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 7)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.layers(source, target))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
        self.up, self.join = nn.ConvTranspose2d(12, 8, 2, stride=2), nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        x = F.relu(self.inner(F.max_pool2d(skip, 2)))
        return self.head(F.relu(self.join(torch.cat([skip, F.relu(self.up(x))], 1))))


class DiffusionBlock(nn.Module):
    """A residual block of a diffusion U-Net: group norm, SiLU, a scale and a shift computed from the time."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(3))
        self.time = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.stem(x)
        scale, shift = self.time(t)[:, :, None, None].chunk(2, 1)
        y = self.first(F.silu(self.norms[0](x)))
        x = x + self.second(F.silu(self.norms[1](y) * (1 + scale) + shift))
        return self.head(F.silu(self.norms[2](x)))


class DenseGcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        x = F.relu(neighbours @ self.first(x))
        return self.head(F.relu(neighbours @ self.second(x)))


class GraphAttention(nn.Module):
    """Weights of a sum over neighbours that are computed from both ends."""

    def __init__(self):
        super().__init__()
        self.value, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.source, self.target = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        values = self.value(x)
        scores = F.leaky_relu(self.source(values) + self.target(values).transpose(1, 2), 0.2)
        return self.head(F.relu(scores.softmax(-1) @ values))


class MlpMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 24, 4, 4), nn.Linear(24, 5)
        self.tokens = nn.Sequential(nn.Linear(16, 20), nn.GELU(), nn.Linear(20, 16))
        self.channels = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return self.head(self.norms[2](x).mean(1))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.out, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Linear(16, 5)
        self.gate = nn.Sequential(nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x * self.gate(x.mean((2, 3), keepdim=True))
        return self.head(F.relu(self.out(x)).mean((2, 3)))


# Odd forward passes


class SharedWeights(nn.Module):
    """One layer at three places, and a head that is the transpose of the first layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Linear(6, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = F.relu(self.body(x))
        return F.linear(x, self.stem.weight.t())


class Slices(nn.Module):
    """Parts of one hidden layer go different ways."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(6, 24), nn.Linear(8, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.left(x[..., :8]) + self.right(x[..., 8:20]) + x[..., 20:].mean(-1, keepdim=True)


class SplitAndCat(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(6, 24), nn.Linear(10, 12), nn.Linear(38, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.relu(self.stem(x)).split([10, 14], -1)
        return self.head(torch.cat([b.flip(-1), F.relu(self.inner(a)), b[..., 2:]], -1))


class Gated(nn.Module):
    """``act(gate(x)) * up(x)`` in one of its spellings."""

    def __init__(self, spelling: str):
        super().__init__()
        self.spelling = spelling
        self.both, self.down = nn.Linear(12, 64), nn.Linear(32, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        both = self.both(self.norm(x))
        return self.head(x + self.down(self.gate(both)))

    def gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        match self.spelling:
            case "SwiGLU by chunk":
                return F.silu(gate) * up
            case "SwiGLU in place":
                gate = F.silu(gate)
                gate *= up
                return gate
            case "GLU":
                return F.glu(both)
            case "GEGLU":
                return F.gelu(gate) * up
            case "GEGLU with tanh":
                return F.gelu(gate, approximate="tanh") * up
            case "ReGLU":
                return F.relu(gate) * up
            case "bilinear":
                return gate * up
            case "sigmoid written out":
                return up / (1 + torch.exp(-gate))
        raise ValueError(self.spelling)


class BilinearLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 9)
        self.join, self.head = nn.Bilinear(8, 9, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.join(F.relu(self.left(x)), F.relu(self.right(x)))))


class TorchAttention(nn.Module):
    """nn.MultiheadAttention between two layers, without norms."""

    def __init__(self):
        super().__init__()
        self.stem, self.attention = nn.Linear(6, 16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(F.relu(x + self.attention(x, x, x, need_weights=False)[0]))


class EinsumAttention(nn.Module):
    """Queries, keys and values in one matrix, and attention as two einsums."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).unbind(-3)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2
        return self.head(x + self.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)))


class GroupedAttention(nn.Module):
    """Four heads of queries on two of keys and values, by ``enable_gqa`` or by ``repeat_interleave``."""

    def __init__(self, repeat: bool):
        super().__init__()
        self.repeat = repeat
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.norm, self.out, self.head = nn.RMSNorm(16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.repeat:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))


class LinearAttention(nn.Module):
    """Attention without a softmax: keys and values are summed to a matrix first."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(6, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.relu(self.q(x)), F.relu(self.k(x)), self.v(x)
        return self.head(q @ (k.transpose(1, 2) @ v))


class GroupedConvolutions(nn.Module):
    """Grouped, depthwise and pointwise convolutions, and a shuffle of channels between groups."""

    def __init__(self):
        super().__init__()
        self.stem, self.grouped = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=4)
        self.depthwise, self.pointwise = nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 12, 1, groups=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.channel_shuffle(F.relu(self.grouped(F.relu(self.stem(x)))), 4)
        return self.head(F.relu(self.pointwise(F.relu(self.depthwise(x)))).mean((2, 3)))


class CellInALoop(nn.Module):
    """A gated recurrent cell written by hand: an update gate, and a ReLU in place of tanh."""

    def __init__(self):
        super().__init__()
        self.gate, self.candidate, self.head = nn.Linear(18, 12), nn.Linear(18, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 12)
        for step in x.unbind(1):
            gate = torch.sigmoid(self.gate(torch.cat([step, state], -1)))
            candidate = F.relu(self.candidate(torch.cat([step, state], -1)))
            state = gate * state + (1 - gate) * candidate
        return self.head(state)


class TorchCellInALoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 12), x.new_zeros(x.shape[0], 12)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


class LowRank(nn.Module):
    """A frozen layer with a low-rank one beside it (LoRA), and a layer with weight norm."""

    def __init__(self):
        super().__init__()
        self.frozen, self.a, self.b = (
            nn.Linear(8, 16),
            nn.Linear(8, 4, bias=False),
            nn.Linear(4, 16, bias=False),
        )
        self.frozen.requires_grad_(False)
        self.normed, self.head = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.normed(F.relu(self.frozen(x) + 2 * self.b(self.a(x))))))


def _batch(*shape: int) -> Tensor:
    """Enough for a ReLU to be active somewhere."""
    return torch.randn(16, *shape)


def _recurrent(layer: type[nn.RNNBase], **options):
    return lambda: (Recurrent(layer, **options), (_batch(5, 6),))


LAYERS = {
    "MLP": lambda: (Mlp(), (_batch(12),)),
    "ReLU6 network": lambda: (ReLU6Net(), (_batch(3, 12, 12),)),
    "nn.RNN, ReLU": _recurrent(nn.RNN, nonlinearity="relu"),
    "nn.LSTM": _recurrent(nn.LSTM),
    "nn.GRU": _recurrent(nn.GRU),
    "nn.Transformer": lambda: (Translator(), (_batch(6, 32), _batch(5, 32))),
    "U-Net": lambda: (UNet(), (_batch(3, 12, 12),)),
    "block of a diffusion U-Net": lambda: (DiffusionBlock(), (_batch(3, 8, 8), _batch(8))),
    "dense GCN": lambda: (DenseGcn(), (_batch(7, 6), _batch(7, 7).softmax(-1))),
    "graph attention": lambda: (GraphAttention(), (_batch(7, 6),)),
    "MLP-Mixer": lambda: (MlpMixer(), (_batch(3, 16, 16),)),
    "squeeze and excite": lambda: (SqueezeExcite(), (_batch(3, 10, 10),)),
}

GATES = (
    "SwiGLU by chunk", "SwiGLU in place", "GLU", "GEGLU", "GEGLU with tanh", "ReGLU", "bilinear",
    "sigmoid written out",
)  # fmt: skip


def _gated(spelling: str):
    return lambda: (Gated(spelling), (_batch(12),))


ODD = {
    "shared and transposed weights": lambda: (SharedWeights(), (_batch(6),)),
    "slices": lambda: (Slices(), (_batch(6),)),
    "split and cat": lambda: (SplitAndCat(), (_batch(6),)),
    **{f"gate: {spelling}": _gated(spelling) for spelling in GATES},
    "nn.Bilinear": lambda: (BilinearLayer(), (_batch(6),)),
    "nn.MultiheadAttention": lambda: (TorchAttention(), (_batch(5, 6),)),
    "attention by einsum": lambda: (EinsumAttention(), (_batch(5, 16),)),
    "grouped attention, enable_gqa": lambda: (GroupedAttention(repeat=False), (_batch(5, 16),)),
    "grouped attention, repeat_interleave": lambda: (GroupedAttention(repeat=True), (_batch(5, 16),)),
    "linear attention": lambda: (LinearAttention(), (_batch(5, 6),)),
    "grouped convolutions": lambda: (GroupedConvolutions(), (_batch(3, 10, 10),)),
    "gated cell in a loop": lambda: (CellInALoop(), (_batch(4, 6),)),
    "nn.LSTMCell in a loop": lambda: (TorchCellInALoop(), (_batch(4, 6),)),
    "LoRA and weight norm": lambda: (LowRank(), (_batch(8),)),
}
