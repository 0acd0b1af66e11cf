"""Blocks on sequences (batch, time, channels): attention, recurrences, mixing over time."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from .random_blocks import Block
from .scale_ledger import FIXED


def rotate(x, spelling):
    """RoPE."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2]).double()[:, None] * torch.tensor([1.0, 0.1, 0.01][:half]).double()
    cos, sin = angles.cos(), angles.sin()
    if spelling == "rotate_half":
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * torch.cat([cos, cos], -1) + turned * torch.cat([sin, sin], -1)
    if spelling == "rotate pairs":
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    if spelling == "rotate pairs, complex":
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return x


class Attention(Block):
    """Every spelling of softmax(q k) v, with grouped queries, RoPE and norms of queries and keys."""

    CORES = ("sdpa", "matmul", "einsum", "bmm", "sigmoid", "linear", "linear normalised")
    GROUPS = ("enable_gqa", "repeat_interleave", "expand", "grouped einsum", "broadcast")

    def __init__(self, pick, width):
        super().__init__()
        self.heads, self.depth = 2, pick.choice([2, 4])
        self.kv_heads = pick.choice([1, 2, 2])
        self.core = self.pick_name(pick, self.CORES)
        self.grouping = (
            pick.choice(self.GROUPS) if self.kv_heads < self.heads else "one key head a query head"
        )
        self.rope = pick.choice(
            ["no rope", "no rope", "rotate_half", "rotate pairs", "rotate pairs, complex"]
        )
        self.qk_norm = pick.choice(["no norm", "no norm", "nn.RMSNorm", "F.normalize"])
        self.packed, self.causal = pick.random() < 0.4, pick.random() < 0.5
        bias, inner, kv = pick.random() < 0.5, self.heads * self.depth, self.kv_heads * self.depth
        if self.packed:
            self.qkv = nn.Linear(width, inner + 2 * kv, bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, n, bias=bias) for n in (inner, kv, kv))
        if self.qk_norm == "nn.RMSNorm":
            self.q_norm, self.k_norm = (nn.RMSNorm(self.depth, eps=1e-6) for _ in "qk")
        self.out = nn.Linear(inner, width, bias=bias)

    def project(self, x):
        """(batch, heads, time, channels) of each."""
        inner, kv = self.heads * self.depth, self.kv_heads * self.depth
        parts = self.qkv(x).split([inner, kv, kv], -1) if self.packed else (self.q(x), self.k(x), self.v(x))
        return [part.unflatten(-1, (-1, self.depth)).transpose(1, 2) for part in parts]

    def forward(self, x):
        q, k, v = self.project(x)
        if self.qk_norm == "nn.RMSNorm":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.qk_norm == "F.normalize":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        q, k = rotate(q, self.rope), rotate(k, self.rope)
        if self.kv_heads < self.heads and self.grouping == "grouped einsum":
            return self.out(self.attend_in_groups(q, k, v))
        if self.kv_heads < self.heads and not (self.grouping == "enable_gqa" and self.core == "sdpa"):
            k, v = (self.repeat(each) for each in (k, v))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def repeat(self, x):
        times = self.heads // self.kv_heads
        if self.grouping == "broadcast" and self.core in ("matmul", "linear", "linear normalised", "sigmoid"):
            return x
        if self.grouping == "repeat_interleave":
            return x.repeat_interleave(times, 1)
        b, h, t, d = x.shape
        return x[:, :, None].expand(b, h, times, t, d).reshape(b, h * times, t, d)

    def attend_in_groups(self, q, k, v):
        q = q.unflatten(1, (self.kv_heads, -1))
        weights = (torch.einsum("bgntd,bgsd->bgnts", q, k) / math.sqrt(self.depth)).softmax(-1)
        return torch.einsum("bgnts,bgsd->btgnd", weights, v).flatten(2)

    def attend(self, q, k, v):
        scale = 1 / math.sqrt(self.depth)
        if self.core == "sdpa":
            gqa = k.shape[1] < q.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=gqa)
        if self.core == "linear":
            return q @ (k.transpose(-1, -2) @ v)
        if self.core == "linear normalised":
            q, k = F.relu(q) + q.abs(), F.relu(k) + k.abs()
            return q @ (k.mT @ v) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
        if self.core == "einsum":
            weights = torch.einsum("bhtd,bhsd->bhts", q, k) * scale
            return torch.einsum("bhts,bhsd->bhtd", self.mask(weights).softmax(-1), v)
        if self.core == "bmm":
            weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * scale
            return torch.bmm(F.softmax(self.mask(weights), -1), v.flatten(0, 1)).unflatten(0, q.shape[:2])
        weights = torch.matmul(q * scale, k.transpose(-2, -1))
        if self.core == "sigmoid":
            return torch.sigmoid(weights) @ v
        return torch.softmax(self.mask(weights), dim=-1) @ v

    def mask(self, weights):
        if not self.causal:
            return weights
        later = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
        return weights.masked_fill(later, -math.inf)

    def scales(self, ledger, ids):
        kind = f"{self.core}, {self.grouping}, {self.rope}, {self.qk_norm}"
        if self.packed:
            inner, kv = self.heads * self.depth, self.kv_heads * self.depth
            q, k, v = ledger.linear(self.qkv, ids, "packed").split([inner, kv, kv], -1)
        else:
            q, k, v = (ledger.linear(module, ids, "separate") for module in (self.q, self.k, self.v))
        # The scales do not change over time: (heads, channels).
        q, k, v = (part[0, 0].unflatten(-1, (-1, self.depth)) for part in (q, k, v))
        ledger.mark(q, f"query-key: {kind}"), ledger.mark(k, f"query-key: {kind}")
        ledger.mark(v, f"value: {self.core}, {self.grouping}")
        if self.qk_norm == "nn.RMSNorm":
            q, k = self.gain(ledger, self.q_norm, q, kind), self.gain(ledger, self.k_norm, k, kind)
        if self.qk_norm == "F.normalize":  # of degree zero
            ledger.tie_along(q, 1), ledger.tie_along(k, 1)
            q, k = torch.full_like(q, FIXED), torch.full_like(k, FIXED)
        if self.rope == "rotate_half":
            q, k = (torch.cat([ledger.tie(*x.chunk(2, -1))] * 2, -1) for x in (q, k))
        if "rotate pairs" in self.rope:
            q, k = (ledger.tie_along(x.unflatten(-1, (-1, 2)), 2).repeat(1, 1, 2).flatten(1) for x in (q, k))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 0) for x in (k, v))
        weights = ledger.tie_along(ledger.multiply(q, k), 1)
        if self.core == "linear" and self.softmax_free:
            v = ledger.multiply(v, weights)
        elif self.core != "linear normalised" or not self.softmax_free:  # that divides by their sum
            ledger.fix(weights)
        return ledger.linear(self.out, v.flatten().expand(1, ids.shape[1], -1), "dense")

    @property
    def softmax_free(self):
        """Grouped einsum has a core of its own."""
        return self.grouping != "grouped einsum"

    def gain(self, ledger, module, ids, kind):
        ledger.fix(ids)
        head = ledger.fresh(f"query-key: gain, {kind}", self.depth)
        ledger.parameter(module.weight, head)
        return head.expand(ids.shape)


class MultiheadAttention(Block):
    def __init__(self, pick, width):
        super().__init__()
        self.module = nn.MultiheadAttention(width, 2, batch_first=True)
        self.weights = pick.random() < 0.5

    def forward(self, x):
        return self.module(x, x, x, need_weights=self.weights)[0]

    def scales(self, ledger, ids):
        tail = ledger.tie_along(ids, 0, 1).reshape(1, -1)
        width = tail.numel()
        head = ledger.fresh("nn.MultiheadAttention", 3 * width)
        ledger.parameter(self.module.in_proj_weight, head[:, None], tail)
        ledger.parameter(self.module.in_proj_bias, head)
        q, k, v = head.chunk(3)
        ledger.mark(q, "query-key: nn.MultiheadAttention"), ledger.mark(v, "value: nn.MultiheadAttention")
        ledger.fix(ledger.multiply(q, k))
        return ledger.linear(self.module.out_proj, v.expand(ids.shape), "dense")


class Recurrent(Block):
    KINDS = ("rnn relu", "rnn tanh", "gru", "lstm", "rnn relu, two directions")

    def __init__(self, pick, width):
        super().__init__()
        self.kind = self.pick_name(pick, self.KINDS)
        options = {"nonlinearity": self.kind.split(",")[0].split()[-1]} if "rnn" in self.kind else {}
        both = "two" in self.kind
        cell = {"gru": nn.GRU, "lstm": nn.LSTM}.get(self.kind, nn.RNN)
        self.cell = cell(
            width, width // 2 if both else width, batch_first=True, bidirectional=both, **options
        )

    def forward(self, x):
        return self.cell(x)[0]

    def scales(self, ledger, ids):
        tail = ledger.tie_along(ledger.mark(ids, f"read by {self.kind}"), 0, 1).reshape(1, -1)
        outputs = []
        for way in ("", "_reverse")[: 1 + self.cell.bidirectional]:
            hidden = ledger.fresh(self.kind, self.cell.hidden_size)
            if "relu" not in self.kind:
                hidden = ledger.fix(hidden)
            gates = hidden.repeat(getattr(self.cell, f"bias_ih_l0{way}").numel() // hidden.numel())
            ledger.parameter(getattr(self.cell, f"weight_ih_l0{way}"), gates[:, None], tail)
            ledger.parameter(getattr(self.cell, f"weight_hh_l0{way}"), gates[:, None], hidden[None])
            for name in ("bias_ih_l0", "bias_hh_l0"):
                ledger.parameter(getattr(self.cell, name + way), gates)
            outputs.append(hidden)
        return torch.cat(outputs).expand(ids.shape)


OVER_TIME = {
    "cumsum": lambda x: x.cumsum(1),
    "causal mean": lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1).double()[:, None],
    "roll over time": lambda x: x.roll(1, 1),
    "token shift": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "max over time": lambda x: x - x.amax(1, keepdim=True),
    "mean over time": lambda x: x + x.mean(1, keepdim=True),
    "sort over time": lambda x: x.sort(1).values,
    "cummax": lambda x: x.cummax(1).values,
    "std over time": lambda x: x + x.std(1, keepdim=True),
    "norm over time": lambda x: x + x.norm(dim=1, keepdim=True),
    "max_pool1d": lambda x: F.max_pool1d(x.mT, 3, 1, 1).mT,
    "difference": lambda x: x - x[:, :1],
    "diff": lambda x: torch.cat([x[:, :1], x.diff(dim=1)], 1),
    "mixing by a constant": lambda x: torch.ones(x.shape[1], x.shape[1]).tril().double() @ x,
    "topk over time": lambda x: x + x.topk(2, dim=1).values.sum(1, keepdim=True),
    "flip over time": lambda x: x.flip(1),
    "unfold": lambda x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
    "slice and cat": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "write to a slice": lambda x: torch.slice_scatter(x, 2 * x[:, :1], 1, 0, 1),
    "in-place write": lambda x: _write(x),
    "fft": lambda x: torch.fft.fft(x, dim=1).real,
    "filter": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=x.shape[1], dim=1),
    "vmap": lambda x: torch.vmap(lambda row: row.flip(0), 0)(x) + x,
    "tensordot": lambda x: torch.tensordot(x, torch.ones(x.shape[1], 4).double(), ([1], [0])).mT,
    "avg_pool1d": lambda x: F.avg_pool1d(x.mT, 3, 1, 1, count_include_pad=False).mT,
    "interpolate": lambda x: F.interpolate(x.mT, scale_factor=2.0, mode="linear").mT[:, ::2],
    "repeat over time": lambda x: x.repeat(1, 2, 1)[:, 1:-3],
    "loop": lambda x: torch.stack([F.relu(part) for part in x.unbind(1)], 1),
    "scan": lambda x: _scan(x),
    "median": lambda x: x + x.median(1, keepdim=True).values,
    "index_add": lambda x: torch.zeros_like(x).index_add(1, torch.tensor([1, 0, 1, 2]), x) + x,
    "scatter": lambda x: torch.zeros_like(x).scatter(
        1, torch.tensor([1, 0, 3, 2])[None, :, None].expand_as(x), x
    ),
}


class OverTime(Block):
    """Operators along time: positively homogeneous, so that a channel keeps one scale."""

    def __init__(self, pick, width):
        super().__init__()
        self.kind = self.pick_name(pick, OVER_TIME)

    def forward(self, x):
        return OVER_TIME[self.kind](x)

    def scales(self, ledger, ids):
        return ledger.tie_along(ledger.mark(ids, self.kind), 1).expand(ids.shape)


def _scan(x):
    state, states = x[:, 0], []
    for t in range(x.shape[1]):
        state = 0.5 * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1)


def _write(x):
    y = x.clone()
    y[:, 1:] += x[:, :-1]
    return y


class Mixing(Block):
    """Learned weights over time: of a mixer, of a causal depthwise convolution, of positions."""

    KINDS = ("mixer", "causal depthwise conv", "positions", "conv over time", "gate over time")

    def __init__(self, pick, width, time):
        super().__init__()
        self.kind = self.pick_name(pick, self.KINDS)
        self.up, self.down = nn.Linear(time, time + 1), nn.Linear(time + 1, time)
        self.depthwise = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.positions = nn.Parameter(torch.rand(time, width))
        self.step = nn.Parameter(torch.rand(width))
        used = {"mixer": ("up", "down"), "causal depthwise conv": ("depthwise",), "positions": ("positions",),
                "conv over time": ("conv",), "gate over time": ("step", "conv")}[self.kind]  # fmt: skip
        for name in {"up", "down", "depthwise", "conv", "positions", "step"} - set(used):
            delattr(self, name)

    def forward(self, x):
        if self.kind == "mixer":
            return self.down(F.relu(self.up(x.transpose(1, 2)))).transpose(1, 2)
        if self.kind == "causal depthwise conv":
            return F.relu(self.depthwise(x.mT)[..., : x.shape[1]]).mT
        if self.kind == "positions":
            return x + self.positions
        if self.kind == "conv over time":
            return F.relu(self.conv(x.permute(0, 2, 1))).permute(0, 2, 1)
        shifted = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return F.relu(self.conv((x + (shifted - x) * self.step).mT)).mT  # as in RWKV

    def scales(self, ledger, ids):
        if self.kind == "mixer":
            return ledger.linear(self.down, ledger.linear(self.up, ids.mT, self.kind), self.kind).mT
        if self.kind == "causal depthwise conv":
            return ledger.conv(self.depthwise, ids.mT, self.kind)[..., : ids.shape[1]].mT
        if self.kind == "positions":
            ledger.parameter(self.positions, ids[0])
            return ids
        if self.kind == "gate over time":
            ids = ledger.tie_along(ids, 1).expand(ids.shape)
            ledger.parameter(self.step, torch.tensor(FIXED))
        return ledger.conv(self.conv, ids.mT, self.kind).mT


BLOCKS = [Attention, Attention, Attention, MultiheadAttention, Recurrent, OverTime, OverTime, Mixing]
