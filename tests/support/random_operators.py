"""Single operators between the blocks of random networks, with what they do to the scales of their input."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import nn
from torch.nn import functional as F

from .random_blocks import Block

MOVES = {
    "roll": lambda x: x.roll(1, -1),
    "flip": lambda x: x.flip(-1),
    "channel shuffle": lambda x: x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
    "cat with slices": lambda x: torch.cat([x[..., 2:], x[..., :2]], -1),
    "split and cat": lambda x: torch.cat(x.split([1, x.shape[-1] - 1], -1)[::-1], -1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, -1)[..., 1::2],
    "stack": lambda x: torch.stack([x[..., ::2], x[..., 1::2]], -2).flatten(-2),
    "repeat": lambda x: torch.cat([x, x], -1)[..., 1 : x.shape[-1] + 1],
    "permute": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "select": lambda x: torch.stack([x.select(-1, i) for i in reversed(range(x.shape[-1]))], -1),
}


INDEXED = {
    "index_select": lambda x, index: x.index_select(-1, index),
    "fancy index": lambda x, index: x[..., index],
    "take_along_dim": lambda x, index: x.take_along_dim(index.expand(x.shape), -1),
    "gather": lambda x, index: x.gather(-1, index.expand(x.shape)),
    "F.embedding": lambda x, index: F.embedding(index, x.transpose(0, -1)).movedim(0, -1)
    if x.dim() == 2 else x[..., index],
}  # fmt: skip


POINTWISE = {
    "negative": lambda x, mask: -x,
    "half": lambda x, mask: x / 2,
    "mask of floats": lambda x, mask: x * mask.double(),
    "masked_fill": lambda x, mask: x.masked_fill(mask, 0.0),
    "where zero": lambda x, mask: torch.where(mask, x, 0.0),
    "where leaky": lambda x, mask: torch.where(x > 0, x, 0.1 * x),
    "where mask": lambda x, mask: torch.where(mask, F.relu(x), -x),
    "threshold": lambda x, mask: F.threshold(x, 0.0, 0.0),
    "positive minus negative": lambda x, mask: F.relu(x) - 0.5 * F.relu(-x),
    "dropout": lambda x, mask: F.dropout(x, 0.5, training=False),
    "times sign": lambda x, mask: x * torch.sign(x),
    "times step": lambda x, mask: x * (x > 0),
    "lerp": lambda x, mask: torch.lerp(x, F.relu(x), 0.3),
    "prelu by hand": lambda x, mask: F.relu(x) + 0.25 * (x - x.abs()) / 2,
    "minimum": lambda x, mask: torch.minimum(x, 0.5 * x),
    "addcmul": lambda x, mask: torch.addcmul(x, x, mask.double(), value=0.5),
}


POWERS = {
    "cube": (lambda x: x**3, 3),
    "pow 2.0 of abs": (lambda x: x.abs().pow(2.0), 2),
    "abs to the 1.5": (lambda x: x.abs().pow(1.5), Fraction(3, 2)),
    "square root of abs": (lambda x: x.abs().sqrt(), Fraction(1, 2)),
    "root of the square": (lambda x: x.square().sqrt(), 1),
    "square of the square": (lambda x: x.square().square(), 4),
    "square by a constant": (lambda x: (0.5 * x.square()).neg() / 3, 2),
    "sign": (lambda x: torch.sign(x) + (x > 0), 0),
    "square over itself": (lambda x: x.square() / (x.abs() + 0.1 * x.abs()), 1),
    "x |x|": (lambda x: x * x.abs(), 2),
    "relu times minus relu": (lambda x: F.relu(x) * -F.leaky_relu(x), 2),
    "x y / |x|": (lambda x: x * x.roll(0, -1) / x.abs(), 1),
}
"""Positively homogeneous of some degree."""


HOLDING = {
    "clamp to an interval": lambda x, mask: x.clamp(-0.5, 0.5),
    "clamp from 0.1": lambda x, mask: x.clamp(min=0.1),
    "clamp to 0.5": lambda x, mask: torch.clamp_max(x, 0.5),
    "plus one": lambda x, mask: x + 1,
    "one minus": lambda x, mask: 1 - x,
    "relu6": lambda x, mask: F.relu6(x),
    "hardshrink": lambda x, mask: F.hardshrink(x, 0.2),
    "threshold at 0.1": lambda x, mask: F.threshold(x, 0.1, 0.0),
    "threshold to 0.1": lambda x, mask: F.threshold(x, 0.0, 0.1),
    "where above": lambda x, mask: torch.where(x > 0.3, x, 0.0),
    "where one": lambda x, mask: torch.where(mask, x, 1.0),
    "masked_fill by ones": lambda x, mask: x.masked_fill(mask, 1.0),
    "masked_fill by itself": lambda x, mask: x.masked_fill(x < 0.2, 0.0),
    "times a comparison": lambda x, mask: x * (x > 0.2),
    "times a comparison with a neighbour": lambda x, mask: x * (x > x.roll(1, -1)),
    "maximum with 0.1": lambda x, mask: torch.maximum(x, torch.full_like(x, 0.1)),
    "minimum with neighbour": lambda x, mask: torch.minimum(x, x.roll(1, -1)) + 0.3,
    "square plus itself": lambda x, mask: x.square() + x,
    "cat with its square": lambda x, mask: (torch.cat([x, x.square()], -1).unflatten(-1, (2, -1)).sum(-2)),
    "square plus one": lambda x, mask: x.square() + 1,
    "hypot": lambda x, mask: torch.hypot(x, torch.ones_like(x)),
    "lerp to one": lambda x, mask: torch.lerp(x, torch.ones_like(x), 0.3),
    "in-place plus": lambda x, mask: (x + 0).add_(0.3).relu_(),
    "softmax": lambda x, mask: x.softmax(-1),
    "softmax gate": lambda x, mask: x.softmax(-1) * x,
    "logsumexp": lambda x, mask: x - x.logsumexp(-1, keepdim=True),
    "elu": lambda x, mask: F.elu(x),
    "celu in place": lambda x, mask: F.celu(x + 0, inplace=True),
    "mish": lambda x, mask: F.mish(x),
    "tanh times": lambda x, mask: x * torch.tanh(x),
    "exp of minus square": lambda x, mask: torch.exp(-x.square()),
    "log1p of abs": lambda x, mask: torch.log1p(x.abs()),
    "sine": lambda x, mask: x + x.sin().square(),
    "pad with one": lambda x, mask: F.pad(x[..., :-1], (1, 0), value=1.0) + x,
    "assign a number": lambda x, mask: _assign(x),
    "nan_to_num": lambda x, mask: torch.nan_to_num(torch.log(x.abs() + 0.1)),
    "variance": lambda x, mask: x / (x.var(-1, keepdim=True) + 0.1).sqrt(),
    "soft cap": lambda x, mask: 2 * torch.tanh(x / 2),
    "gradient stopped": lambda x, mask: x.detach() * x.sigmoid(),
    "complex": lambda x, mask: torch.polar(torch.ones_like(x), x).real + x,
    "straight through": lambda x, mask: x + (x.round() - x).detach(),
    "index by its argmax": lambda x, mask: x - x.gather(-1, x.argmax(-1, keepdim=True)),
}  # fmt: skip
"""Not homogeneous: the channels are fixed, though parts of what happens may look as if they were not."""


def _assign(x):
    y = x.clone()
    y[..., 0] = 1.0
    return y


class Odd(Block):
    def __init__(self, pick, width):
        super().__init__()
        tables = [MOVES, INDEXED, POINTWISE, POWERS, HOLDING]
        self.kind = self.pick_name(pick, pick.choice(tables))
        self.linear = nn.Linear(width, width) if pick.random() < 0.7 else None
        self.register_buffer("index", torch.tensor(pick.sample(range(width), width)))
        self.register_buffer("mask", torch.tensor([pick.random() < 0.3 for _ in range(width)]))

    def apply_operator(self, x):
        if self.kind in MOVES:
            return MOVES[self.kind](x)
        if self.kind in INDEXED:
            return INDEXED[self.kind](x, self.index)
        if self.kind in POWERS:
            return POWERS[self.kind][0](x)
        return (POINTWISE | HOLDING)[self.kind](x, self.mask)

    def forward(self, x):
        return self.apply_operator(x if self.linear is None else self.linear(x))

    def scales(self, ledger, ids):
        if self.linear is not None:
            ids = ledger.linear(self.linear, ids, "dense")
        if self.kind in HOLDING:
            return ledger.fix(ids)
        ledger.mark(ids, self.kind)
        if self.kind in POWERS:
            return ledger.multiply(torch.zeros_like(ids), ids, POWERS[self.kind][1])
        return ids if self.kind in POINTWISE else self.apply_operator(ids.contiguous())
