"""The calls that the library makes for a Llama, recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pathsgd._torch import ALL_GATHER

from .calls import Call, Calls, Kind
from .shapes import LlamaSize


class Attention(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.grouped = size.kv_heads < size.heads
        self.query, self.out = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.key, self.value = (
            nn.Linear(size.width, self.head * size.kv_heads, bias=False) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor) -> Tensor:
    """By position: both halves of every head together."""
    half = x.shape[-1] // 2
    place, pair = (torch.arange(n, device=x.device) for n in (x.shape[-2], half))
    angle = place[:, None] / 10000 ** (pair / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaLayer(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(size.width) for _ in range(2))
        self.attention, self.mlp = Attention(size), SwiGLU(size.width, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.Sequential(*(LlamaLayer(size) for _ in range(size.layers)))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens))))


KINDS: dict[str, Kind] = {
    ALL_GATHER: "gather", "all_reduce": "reduce", "all_to_all_single": "exchange",
}  # fmt: skip


@contextmanager
def recorded(answer: bool = False) -> Iterator[list[Call]]:
    """The calls that Python code asks torch.distributed for. With ``answer`` nothing is sent, and what would
    have been received is made up."""
    calls: list[Call] = []
    originals = {name: getattr(dist, name) for name in KINDS}

    def recording(name: str, kind: Kind) -> Callable[..., object]:
        def call(*args: Any, group: dist.ProcessGroup | None = None) -> object:
            sent, ranks = args[kind != "reduce"], dist.get_world_size(group)
            calls.append(Call(kind, sent.numel(), sent.element_size(), ranks))
            if not answer:
                return originals[name](*args, group=group)
            if kind == "gather":
                args[0].view(ranks, -1).copy_(sent.flatten())
            elif kind == "exchange":
                args[0].fill_(0.01)
            return None

        return call

    for name, kind in KINDS.items():
        setattr(dist, name, recording(name, kind))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def count(size: LlamaSize, ranks: int) -> dict[str, Calls]:
    """The calls of a first step of rank 0 of many, of which only that one is run."""
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import pathsgd
    from pathsgd.optim.relative import muon

    muon.orthogonalize_all = lambda blocks: blocks  # which sends nothing, and would take minutes
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with torch.device("meta"):
        model = Llama(size)
    graph = pathsgd.trace(model, torch.zeros(1, 8, dtype=torch.long, device="meta"))
    fully_shard(model).to_empty(device="cpu")
    found = {}
    for optimizer_of in (pathsgd.PathAdam, pathsgd.PathMuon):
        for p in model.parameters():
            p.detach().to_local().normal_()
            p.grad = torch.ones_like(p)
        with recorded(answer=True) as calls:
            optimizer_of(model, graph).step()
        found[optimizer_of.__name__] = Counter(calls)
    dist.destroy_process_group()
    return found
