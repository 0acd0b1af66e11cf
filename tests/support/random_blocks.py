"""Blocks that networks are composed of at random: each once for torch, as people write it, and once for the
ledger, as scales of its channels. They work on the last axis of vectors and of sequences."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .scale_ledger import FIXED

HOMOGENEOUS = {
    "relu": F.relu, "leaky relu": lambda x: F.leaky_relu(x, 0.2), "abs": torch.abs,
    "clamp": lambda x: x.clamp(min=0), "in-place relu": lambda x: F.relu(x + 0, inplace=True),
    "maximum with zero": lambda x: torch.maximum(x, torch.zeros_like(x)),
}  # fmt: skip
CURVED = {
    "silu": F.silu, "gelu": F.gelu, "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "silu by hand": lambda x: x * torch.sigmoid(x),
    "softplus": F.softplus,
}  # fmt: skip
ACTIVATIONS = HOMOGENEOUS | CURVED | {"identity": lambda x: x}


class Block(nn.Module):
    """``pick`` is a random.Random; ``width`` channels in, and out as well unless a block says otherwise."""

    def pick_name(self, pick, names):
        self.name = pick.choice(sorted(names))
        return self.name

    def scales(self, ledger, ids):
        """The scales of the output, given those of the input."""
        raise NotImplementedError


def activate(ledger, ids, name):
    return ledger.fix(ids) if name in CURVED else ids


class Dense(Block):
    def __init__(self, pick, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=pick.random() < 0.8)
        self.activation = self.pick_name(pick, ACTIVATIONS)

    def forward(self, x):
        return ACTIVATIONS[self.activation](self.linear(x))

    def scales(self, ledger, ids):
        return activate(ledger, ledger.linear(self.linear, ids, "dense"), self.activation)


SQUARES = {
    "square": lambda x: F.relu(x).square(),
    "power": lambda x: F.relu(x) ** 2,
    "times itself": lambda x: F.relu(x) * F.relu(x),
    "x relu(x)": lambda x: x * F.relu(x),
}


class SquaredRelu(Block):
    def __init__(self, pick, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 1), nn.Linear(width + 1, width)
        self.spelling = self.pick_name(pick, SQUARES)

    def forward(self, x):
        return self.down(SQUARES[self.spelling](self.up(x)))

    def scales(self, ledger, ids):
        up = ledger.linear(self.up, ids, f"squared by {self.spelling}")
        return ledger.linear(self.down, ledger.multiply(up, up), "dense")


OF_TWO = {
    "gate first": lambda f, g, u: f(g) * u,
    "up first": lambda f, g, u: u * f(g),
    "torch.mul": lambda f, g, u: torch.mul(f(g), u),
    "einsum": lambda f, g, u: torch.einsum("...i,...i->...i", f(g), u),
    "addcmul": lambda f, g, u: torch.addcmul(torch.zeros_like(u), f(g), u),
}


OF_ONE = {
    "chunk": lambda y: y.chunk(2, -1),
    "split": lambda y: y.split(y.shape[-1] // 2, -1),
    "slices": lambda y: (y[..., : y.shape[-1] // 2], y[..., y.shape[-1] // 2 :]),
    "interleaved": lambda y: (y[..., ::2], y[..., 1::2]),
    "unbind": lambda y: y.unflatten(-1, (2, -1)).unbind(-2),
    "tensor_split": lambda y: y.tensor_split(2, -1),
}


class Gated(Block):
    """act(gate(x)) * up(x)"""

    def __init__(self, pick, width):
        super().__init__()
        hidden = width + 2
        self.activation = self.pick_name(pick, ACTIVATIONS)
        self.spelling = pick.choice([*OF_TWO, *OF_ONE, "in place", "glu"])
        bias = pick.random() < 0.5
        if self.spelling in OF_ONE or self.spelling == "glu":
            self.both = nn.Linear(width, 2 * hidden, bias=bias)
        else:
            self.gate, self.up = nn.Linear(width, hidden, bias=bias), nn.Linear(width, hidden, bias=bias)
        self.norm = nn.RMSNorm(hidden, eps=1e-6) if pick.random() < 0.15 else None
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        function = ACTIVATIONS[self.activation]
        if self.spelling == "glu":
            y = F.glu(self.both(x), -1)
        elif self.spelling in OF_ONE:
            gate, up = OF_ONE[self.spelling](self.both(x))
            y = function(gate) * up
        elif self.spelling == "in place":
            y = function(self.gate(x)).clone()
            y *= self.up(x)
        else:
            y = OF_TWO[self.spelling](function, self.gate(x), self.up(x))
        return self.down(y if self.norm is None else self.norm(y))

    def scales(self, ledger, ids):
        activation, kind = self.activation, f"{self.activation}(gate) * up"
        if self.spelling == "glu":
            activation, kind = "sigmoid", "glu"
            up, gate = ledger.linear(self.both, ids, kind).chunk(2, -1)
        elif self.spelling in OF_ONE:
            gate, up = OF_ONE[self.spelling](ledger.linear(self.both, ids, kind))
        else:
            gate, up = (ledger.linear(module, ids, kind) for module in (self.gate, self.up))
        product = ledger.multiply(activate(ledger, gate, activation), up)
        ledger.mark(product, f"product: {self.spelling}")
        if self.norm is not None:
            product = ledger.gain(self.norm, product, "gain of nn.RMSNorm")
        return ledger.linear(self.down, product, "dense")


class Products(Block):
    """Three factors, one of them without an activation; FiLM; nn.Bilinear."""

    KINDS = ("three factors", "scale and shift", "nn.Bilinear", "with its own square", "divided by softplus")

    def __init__(self, pick, width):
        super().__init__()
        self.kind = self.pick_name(pick, self.KINDS)
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.bilinear = nn.Bilinear(width, width, width) if self.kind == "nn.Bilinear" else None
        self.down = nn.Linear(width, width)

    def forward(self, x):
        a, b = F.relu(self.a(x)), self.b(x)
        if self.kind == "three factors":
            y = a * b * F.leaky_relu(self.c(x))
        elif self.kind == "scale and shift":
            y = F.relu(a * b + self.c(x))
        elif self.kind == "nn.Bilinear":
            y = self.bilinear(a, b) + self.c(x)
        elif self.kind == "with its own square":
            y = a * b + (self.c(x) * a).square()
        else:
            y = a / (1 + F.softplus(b)) + self.c(x)
        return self.down(y)

    def scales(self, ledger, ids):
        a, b, c = (ledger.linear(m, ids, f"product: {self.kind}") for m in (self.a, self.b, self.c))
        if self.kind == "three factors":
            y = ledger.multiply(ledger.multiply(a, b), c)
        elif self.kind == "scale and shift":
            y = ledger.tie(ledger.multiply(a, b), c)
        elif self.kind == "nn.Bilinear":
            first, second = (ledger.tie_along(i, *range(i.dim() - 1)).reshape(-1) for i in (a, b))
            head = ledger.fresh(f"product: {self.kind}", self.bilinear.out_features)
            into = ledger.multiply(first[:, None], second[None])
            ledger.parameter(self.bilinear.weight, head[:, None, None], into[None])
            ledger.parameter(self.bilinear.bias, head)
            y = ledger.tie(head.expand(ids.shape), c)
        elif self.kind == "with its own square":
            squared = ledger.multiply(ledger.multiply(c, c), ledger.multiply(a, a))
            y = ledger.tie(ledger.multiply(a, b), squared)
        else:
            ledger.fix(b)
            y = ledger.tie(a, c)
        return ledger.linear(self.down, y, "dense")


class Norm(Block):
    """Of torch, and written out."""

    SPELLINGS = ("nn.LayerNorm", "nn.RMSNorm", "F.rms_norm", "rms by hand", "layer norm by hand", "1 + gain")

    def __init__(self, pick, width):
        super().__init__()
        self.spelling = self.pick_name(pick, self.SPELLINGS)
        self.module = nn.LayerNorm(width) if "ayer" in self.spelling else nn.RMSNorm(width, eps=1e-6)

    def forward(self, x):
        gain, eps = self.module.weight, 1e-5
        if self.spelling == "F.rms_norm":
            return F.rms_norm(x, (x.shape[-1],), gain, 1e-6)
        if self.spelling == "rms by hand":
            return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
        if self.spelling == "1 + gain":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + gain)
        if self.spelling == "layer norm by hand":
            centred = x - x.mean(-1, keepdim=True)
            variance = x.var(-1, keepdim=True, unbiased=False)
            return centred / torch.sqrt(variance + eps) * gain + self.module.bias
        return self.module(x)

    def scales(self, ledger, ids):
        out = ledger.gain(self.module, ids, f"gain of {self.spelling}")
        return ledger.fix(out) if self.spelling == "1 + gain" else out


class Parts(Block):
    """Some channels through a relu, some through tanh; two branches; pieces of a maximum; a learned scale."""

    KINDS = ("relu and tanh", "cat of branches", "maximum", "learned scale", "prelu", "tied twice",
             "weight and its transpose", "max over pieces", "stacked experts", "soft experts")  # fmt: skip

    def __init__(self, pick, width):
        super().__init__()
        self.kind, half = self.pick_name(pick, self.KINDS), width // 2
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        if self.kind == "cat of branches":
            self.a, self.b = nn.Linear(width, half), nn.Linear(width, width - half)
        if self.kind in ("learned scale", "prelu"):
            self.vector = nn.Parameter(torch.rand(width))
        if self.kind == "max over pieces":
            self.a = nn.Linear(width, 2 * width)
        if "experts" in self.kind:
            self.up, self.down = (nn.Parameter(torch.randn(2, width, width)) for _ in range(2))

    def forward(self, x):
        a = self.a(x)
        if self.kind == "relu and tanh":
            return self.b(torch.cat([F.relu(a[..., :2]), torch.tanh(a[..., 2:])], -1))
        if self.kind == "cat of branches":
            return torch.cat([F.relu(a), self.b(x)], -1)
        if self.kind == "maximum":
            return torch.maximum(a, self.b(x))
        if self.kind == "learned scale":
            return self.b(F.relu(a)) * self.vector
        if self.kind == "prelu":
            return self.b(torch.prelu(a.movedim(-1, 0)[None], self.vector)[0].movedim(0, -1))
        if self.kind == "tied twice":
            return self.b(F.relu(self.a(F.relu(a))))
        if self.kind == "weight and its transpose":
            return F.linear(F.relu(a), self.a.weight.T)
        if self.kind == "max over pieces":
            return self.b(a.unflatten(-1, (-1, 2)).amax(-1))
        hidden = F.relu(torch.einsum("...i,eio->...eo", x, self.up))
        if self.kind == "stacked experts":
            return torch.einsum("...ei,eio->...o", hidden, self.down) + F.relu(a)
        routes = a[..., :2].softmax(-1)
        return torch.einsum("...e,...ei,eio->...o", routes, hidden, self.down)

    def scales(self, ledger, ids):
        a = ledger.linear(self.a, ids, self.kind)
        if self.kind == "relu and tanh":
            ledger.fix(a[..., 2:])
            return ledger.linear(self.b, a, "dense")
        if self.kind == "cat of branches":
            return torch.cat([a, ledger.linear(self.b, ids, self.kind)], -1)
        if self.kind == "maximum":
            return ledger.tie(a, ledger.linear(self.b, ids, self.kind))
        if self.kind == "learned scale":
            b = ledger.linear(self.b, a, self.kind)
            out = ledger.fresh(self.kind, b.shape[-1])
            ledger.parameter(self.vector, out, ledger.tie_along(b, *range(b.dim() - 1)).reshape(-1))
            return out.expand(b.shape)
        if self.kind == "prelu":
            ledger.parameter(self.vector, torch.tensor(FIXED))
            return ledger.linear(self.b, a, "dense")
        if self.kind == "tied twice":
            return ledger.linear(self.b, ledger.linear(self.a, a, self.kind), "dense")
        if self.kind == "weight and its transpose":
            tail = ledger.tie_along(a, *range(a.dim() - 1)).reshape(-1)
            head = ledger.fresh(self.kind, a.shape[-1])
            ledger.parameter(self.a.weight, head[None], tail[:, None])
            return head.expand(a.shape)
        if self.kind == "max over pieces":
            return ledger.linear(self.b, ledger.tie_along(a.unflatten(-1, (-1, 2)), -1)[..., 0], "dense")
        width = ids.shape[-1]
        tail = ledger.tie_along(ids, *range(ids.dim() - 1)).reshape(1, -1, 1)
        hidden, out = ledger.fresh(self.kind, 2, width), ledger.fresh("dense", width)
        ledger.parameter(self.up, hidden[:, None], tail.expand(2, -1, width))
        ledger.parameter(self.down, out[None, None].expand(2, width, -1), hidden[..., None])
        if self.kind == "stacked experts":
            return ledger.tie(out.expand(ids.shape), a)
        ledger.fix(a)
        return out.expand(ids.shape)


class Residual(Block):
    """x + f(x), with a norm before f, after it, or none."""

    def __init__(self, pick, width, inner):
        super().__init__()
        self.where = pick.choice(["none", "before", "after"])
        self.norm = Norm(pick, width) if self.where != "none" else None
        self.inner = inner

    def forward(self, x):
        y = self.inner(self.norm(x) if self.where == "before" else x)
        return self.norm(x + y) if self.where == "after" else x + y

    def scales(self, ledger, ids):
        y = self.inner.scales(ledger, self.norm.scales(ledger, ids) if self.where == "before" else ids)
        y = ledger.tie(ids, y)
        return self.norm.scales(ledger, y) if self.where == "after" else y


BLOCKS = [Dense, SquaredRelu, Gated, Gated, Products, Norm, Parts, Parts]
