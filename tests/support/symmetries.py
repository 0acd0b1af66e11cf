"""Small networks in which factors of units are products of others: gated MLPs, attention, experts. Each says
by hand, in a ledger that shares nothing with the library, what its rescalings are."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from support.scale_ledger import Ledger


class Symmetric(nn.Module):
    example = (4, 5)

    def find_rescalings(self):
        """All of them, by hand."""
        ledger = Ledger()
        fixed = torch.zeros(1, *self.example[1:], dtype=torch.long)
        ledger.fix(self.scales(ledger, fixed))
        return ledger.solve(self)


class Gated(Symmetric):
    """SwiGLU as a Llama has it: nothing passes the gate, the other branch leads to what reads the product."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(5)
        self.gate, self.up, self.down = nn.Linear(5, 6, bias=False), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def scales(self, ledger, ids):
        ids = ledger.gain(self.norm, ids, "gain")
        ledger.fix(ledger.linear(self.gate, ids, "gate"))
        return ledger.linear(self.down, ledger.linear(self.up, ids, "up"), "output")


class Bilinear(Gated):
    """Both branches are homogeneous: what reads the product is divided by both factors."""

    def forward(self, x):
        x = self.norm(x)
        return self.down(F.relu(self.gate(x)) * self.up(x))

    def scales(self, ledger, ids):
        ids = ledger.gain(self.norm, ids, "gain")
        product = ledger.multiply(ledger.linear(self.gate, ids, "gate"), ledger.linear(self.up, ids, "up"))
        return ledger.linear(self.down, product, "output")


class Attention(Symmetric):
    """Two queries for each key and value; places turn queries and keys, two channels at once."""

    example = (4, 3, 5)

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(5, 16), nn.Linear(5, 8), nn.Linear(5, 8, bias=False)
        self.out = nn.Linear(16, 3)
        angles = torch.arange(3)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turn(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def split(self, x, heads):
        return x.unflatten(-1, (heads, 4)).transpose(-2, -3)

    def forward(self, x):
        q, k = self.turn(self.split(self.q(x), 4)), self.turn(self.split(self.k(x), 2))
        v = self.split(self.v(x), 2)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def scales(self, ledger, ids):
        q = ledger.linear(self.q, ids, "queries").view(1, 3, 2, 2, 2, 2)
        k = ledger.linear(self.k, ids, "keys").view(1, 3, 2, 1, 2, 2)
        for x in (q, k):
            ledger.tie(x[..., 0, :], x[..., 1, :])  # two channels that turn into each other
        ledger.fix(ledger.multiply(q, k))
        v = ledger.linear(self.v, ids, "values").view(1, 3, 2, 1, 4).expand(-1, -1, -1, 2, -1)
        return ledger.linear(self.out, v.reshape(1, 3, 16), "output")


class NormalisedQueries(Symmetric):
    """Queries and keys are normalised: their gains are rescaled against each other, nothing before."""

    example = (4, 3, 5)

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(5, 8)
        self.norm_q, self.norm_k, self.out = nn.RMSNorm(4), nn.RMSNorm(4), nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(-2, -3) for f in (self.q, self.k, self.v))
        scores = self.norm_q(q) @ self.norm_k(k).transpose(-1, -2) / 2
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def scales(self, ledger, ids):
        q, k = ledger.linear(self.q, ids, "queries"), ledger.linear(self.k, ids, "keys")
        q = ledger.gain(self.norm_q, q.reshape(1, 6, 4), "gain")
        ledger.fix(ledger.multiply(q, ledger.gain(self.norm_k, k.reshape(1, 6, 4), "gain")))
        return ledger.linear(self.out, ledger.linear(self.v, ids, "values"), "output")


class CrossAttention(Symmetric):
    """One matrix for queries, keys and values, whose rows read different things."""

    example = (4, 3, 5)

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(5, 4)
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        kept = F.relu(self.second(x))
        return self.last(F.relu(self.attention(F.relu(self.first(x)), kept, kept, need_weights=False)[0]))

    def scales(self, ledger, ids):
        first = ledger.tie_along(ledger.linear(self.first, ids, "first"), 1).reshape(-1)
        second = ledger.tie_along(ledger.linear(self.second, ids, "second"), 1).reshape(-1)
        heads = ledger.fresh("queries, keys, values", 12)
        ledger.parameter(self.attention.in_proj_bias, heads)
        tails = torch.cat([first.expand(4, 4), second.expand(8, 4)])
        ledger.parameter(self.attention.in_proj_weight, heads[:, None], tails)
        ledger.fix(ledger.multiply(heads[:4], heads[4:8]))
        mixed = ledger.linear(self.attention.out_proj, heads[8:].expand(1, 3, 4), "mixed")
        return ledger.linear(self.last, mixed, "output")


class Experts(Symmetric):
    """Weights of all experts in one tensor, of which a router chooses: each has units of its own."""

    example = (4, 5)

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(5, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 5)), nn.Parameter(torch.randn(3, 4, 6))

    def forward(self, x):
        share, chosen = self.router(x).softmax(-1).topk(2)
        h = F.relu(torch.einsum("bkoi,bi->bko", self.up[chosen], x))
        return (torch.einsum("bkoi,bki->bko", self.down[chosen], h) * share[..., None]).sum(1)

    def scales(self, ledger, ids):
        ledger.fix(ledger.linear(self.router, ids, "router"))
        h = ledger.fresh("expert", 1, 6, 1)  # all experts are rescaled together
        ledger.parameter(self.up, h)
        ledger.parameter(self.down, torch.zeros(1, 1, 1, dtype=torch.long), h.view(1, 1, 6))
        return torch.zeros(1, 4, dtype=torch.long)


class StoredWithoutOne(Gated):
    """Gains of ``1 + weight``, as Gemma has them. The ledger does not know these."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        x = F.rms_norm(x, (5,)) * (1 + self.gain)
        return self.down(F.silu(self.gate(x)) * self.up(x))


NETWORKS = [Gated, Bilinear, Attention, NormalisedQueries, CrossAttention, Experts]
