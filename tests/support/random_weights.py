"""Blocks of random networks whose weights are parts, copies or views of parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .random_blocks import Block
from .scale_ledger import FIXED

VIEWS = {
    "as it is": lambda w: w,
    "transposed": lambda w: w.T,
    "flipped": lambda w: w.flip(0),
    "rolled": lambda w: w.roll(1, 0),
    "rows in another order": lambda w: w[torch.tensor([2, 0, 3, 1])],
    "cat of slices": lambda w: torch.cat([w[2:], w[:2]]),
    "stacked rows": lambda w: torch.stack([w[0], w[2], w[1], w[3]]),
    "one row for all": lambda w: w[:1].expand(4, -1),
    "two rows repeated": lambda w: w[:2].repeat(2, 1),
    "interleaved": lambda w: w.reshape(2, 2, -1).transpose(0, 1).reshape(4, -1),
    "reshaped": lambda w: w.flatten().view(2, 8).mT.reshape(4, 4),
    "negative": lambda w: -w,
    "halved": lambda w: w / 2,
    "lower triangle": lambda w: w.tril(),
    "masked": lambda w: w * torch.tensor([1.0, 0.0, 1.0, 1.0]).double(),
    "diagonal": lambda w: torch.diag(w[0]),
    "cloned": lambda w: w.clone().contiguous(),
}


class ViewedWeight(Block):
    """One matrix through one or two views; the second reads what the first has written."""

    def __init__(self, pick, width):
        super().__init__()
        self.first, self.second = pick.choice(sorted(VIEWS)), pick.choice(sorted(VIEWS))
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.between = nn.Linear(width, width) if pick.random() < 0.5 else None
        self.spelling = self.pick_name(pick, ["F.linear", "matmul", "einsum", "weight first"])

    def multiply(self, x, w):
        if self.spelling == "F.linear":
            return F.linear(x, w)
        if self.spelling == "matmul":
            return x @ w.T
        if self.spelling == "einsum":
            return torch.einsum("oi,...i->...o", w, x)
        return (w @ x[..., None]).squeeze(-1)

    def forward(self, x):
        x = F.relu(self.multiply(x, VIEWS[self.first](self.weight)))
        if self.between is not None:
            x = F.relu(self.between(x))
        return self.multiply(x, VIEWS[self.second](self.weight))

    def scales(self, ledger, ids):
        label = f"weight: {self.first}, {self.second}, {self.spelling}"
        ids = self.write(ledger, ids, self.first, label)
        if self.between is not None:
            ids = ledger.linear(self.between, ids, "dense")
        out = self.write(ledger, ids, self.second, label)
        used = torch.isin(torch.arange(1, 17), torch.cat([places(self.first), places(self.second)]))
        ledger.fix(ledger.parameters[self.weight].flatten()[~used])
        return out

    def write(self, ledger, ids, view, label):
        tail = ledger.tie_along(ids, *range(ids.dim() - 1)).reshape(1, -1)
        head = ledger.fresh(label, 4)
        scale = ledger.multiply(head[:, None], tail, -1)
        index = places(view)
        if self.weight not in ledger.parameters:
            ledger.parameters[self.weight] = ledger.fresh(label, 4, 4)
        known = torch.cat([torch.tensor([FIXED]), ledger.parameters[self.weight].flatten()])
        used = index > 0
        ledger.tie(known[index][used], scale.flatten()[used])
        return head.expand(*ids.shape[:-1], 4)


def places(view):
    """Which entry of the parameter stands where, counted from one; zero where none does."""
    index = VIEWS[view](torch.arange(1, 17).reshape(4, 4).double())
    return (2 * index if view == "halved" else index).abs().long().flatten()


class LearnedTokens(Block):
    """A parameter in the place of an activation: joined to a sequence, added, multiplied, or a query."""

    KINDS = ("class token", "added", "multiplied", "attended by", "computed", "maximum")

    def __init__(self, pick, width):
        super().__init__()
        self.kind = self.pick_name(pick, self.KINDS)
        self.token, self.linear = nn.Parameter(torch.rand(1, width)), nn.Linear(width, width)

    def forward(self, x):
        if self.kind == "class token":
            token = F.relu(self.linear(self.token)).expand(*x.shape[:-1], -1)
            return torch.stack([x, token], -2).sum(-2)
        if self.kind == "added":
            return F.relu(self.linear(x + self.token)) + self.token
        if self.kind == "multiplied":
            return self.linear(F.relu(x * self.token) * self.token)
        if self.kind == "attended by":
            return self.linear(x) * torch.sigmoid(x @ self.token.T)
        if self.kind == "computed":
            return self.linear(x * torch.exp(self.token) + F.relu(self.token))
        return self.linear(torch.maximum(x, self.token))

    def scales(self, ledger, ids):
        label = f"learned token: {self.kind}"
        whole = ledger.tie_along(ids, *range(ids.dim() - 1)).reshape(-1)
        token = ledger.fresh(label, whole.numel())
        ledger.parameter(self.token, token)
        if self.kind == "class token":
            ledger.tie(whole, ledger.linear(self.linear, token[None], label)[0])
            return ids
        if self.kind in ("added", "maximum"):
            ledger.tie(whole, token)
        if self.kind == "attended by":
            ledger.fix(ledger.multiply(whole, token))
        if self.kind == "computed":
            ledger.fix(token), ledger.fix(whole)
        into = ids
        if self.kind == "multiplied":
            into = ledger.multiply(ids, token, 2)
        out = ledger.linear(self.linear, into, label)
        return ledger.tie(out, token.expand(out.shape)) if self.kind == "added" else out


BLOCKS = [ViewedWeight, ViewedWeight, LearnedTokens]
