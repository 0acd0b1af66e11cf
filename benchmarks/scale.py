"""Memory and traffic of a step of large models on many GPUs, from their shapes alone: docs/scale.md.

    python benchmarks/scale.py             # the tables
    python benchmarks/scale.py --count     # and counts the calls of a small Llama on many ranks

Every call of ``torch.distributed`` that a relative step makes is listed by :func:`step_calls`.
``tests/distributed/test_sharded_relative.py`` compares the list with the calls of real ranks, one by one.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

FLOAT, DOUBLE = 4, 8
LATENCY = 20e-6
"""Seconds that a call takes however little it sends, as a rule of thumb."""
FIRST = 8
"""Power iterations of PathAdam in its first step; one later."""
PIECES = 16
"""Rows that are read apart in more pieces stay one block (``MOST`` of pathsgd.optim.relative.blocks)."""


# Shapes


@dataclass(frozen=True)
class Matrix:
    """Matrices of one shape."""

    rows: int
    columns: int
    forward: bool = False
    """Whether a weight follows on its paths, so that what arrives at its rows is needed."""
    backward: bool = False
    """Whether a weight comes before on its paths, so that what leaves its columns is needed."""
    blocks: int = 1
    orthogonal: bool = True
    """Whether Muon orthogonalises it: not embeddings and the last layer."""
    parallel: Literal["rows", "columns"] = "rows"
    """What tensor parallelism shards: the rows (ColwiseParallel) or the columns (RowwiseParallel)."""
    count: int = 1


@dataclass(frozen=True)
class Vector:
    """Vectors of one length: biases, weights of norms. Or tables of positions, ``each`` numbers in a row."""

    rows: int
    each: int = 1
    blocks: int = 1
    count: int = 1


@dataclass(frozen=True)
class Shape:
    """What a step needs to know of a model."""

    matrices: Sequence[Matrix]
    vectors: Sequence[Vector] = field(default_factory=list)
    units: int = 0
    """That can be rescaled, by their scales in the state of the optimizer; one more stands for the others."""

    @property
    def numel(self) -> int:
        return sum(m.rows * m.columns * m.count for m in self.matrices) + sum(
            v.rows * v.each * v.count for v in self.vectors
        )

    @property
    def orthogonal(self) -> int:
        """Numbers in the matrices that Muon orthogonalises."""
        return sum(m.rows * m.columns * m.count for m in self.matrices if m.orthogonal)


def stack_shape(*widths: int) -> Shape:
    """Linear layers with biases and ReLU."""
    last = len(widths) - 2
    return Shape(
        [
            Matrix(rows, columns, forward=k < last, backward=k > 0, orthogonal=k < last)
            for k, (columns, rows) in enumerate(pairwise(widths))
        ],
        [Vector(rows) for rows in widths[1:]],
    )


def gpt_shape(width: int, layers: int, vocabulary: int, context: int) -> Shape:
    """GPT-2 with packed queries, keys and values, ReLU, and a last layer of its own."""
    d = width
    per_layer = [
        Matrix(3 * d, d, forward=True, backward=True, blocks=3, count=layers),
        Matrix(d, d, backward=True, count=layers),
        Matrix(4 * d, d, forward=True, backward=True, count=layers),
        Matrix(d, 4 * d, backward=True, count=layers),
    ]
    ends = [Matrix(vocabulary, d, orthogonal=False), Matrix(vocabulary, d, backward=True, orthogonal=False)]
    vectors = [
        Vector(3 * d, blocks=3, count=layers),
        Vector(4 * d, count=layers),
        Vector(d, count=6 * layers + 2),
        Vector(context, d),
    ]
    return Shape([*per_layer, *ends], vectors)


@dataclass(frozen=True)
class LlamaSize:
    """The sizes by which a Llama is known."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int

    def shape(self) -> Shape:
        """Paths end in SwiGLU's product and in the rotation of queries and keys; values lead into the output
        projection, unless queries are grouped."""
        d, h, n = self.width, self.hidden, self.layers
        kv, grouped = d // self.heads * self.kv_heads, self.kv_heads < self.heads
        matrices = [
            Matrix(d, d, backward=True, blocks=_pieces(2 * self.heads), count=n),
            Matrix(kv, d, backward=True, blocks=_pieces(2 * self.kv_heads), count=n),
            Matrix(kv, d, forward=not grouped, backward=True, count=n),
            Matrix(d, d, backward=True, parallel="columns", count=n),
            Matrix(h, d, backward=True, count=2 * n),
            Matrix(d, h, parallel="columns", count=n),
            Matrix(self.vocabulary, d, orthogonal=False),
            Matrix(self.vocabulary, d, backward=True, orthogonal=False),
        ]
        return Shape(matrices, [Vector(d, count=2 * n + 1)], (2 * n + 1) * d + (0 if grouped else n * kv))


def _pieces(count: int) -> int:
    """A rotation reads both halves of every head apart."""
    return count if count <= PIECES else 1


LLAMAS = {
    "7B": LlamaSize(32, 4096, 11008, 32, 32, 32000),
    "70B": LlamaSize(80, 8192, 28672, 64, 8, 32000),
}


# What is sent


Kind = Literal["gather", "reduce", "exchange", "scatter"]


@dataclass(frozen=True)
class Call:
    """A collective call."""

    kind: Kind
    numbers: int
    """That this rank passes to it."""
    size: int
    """Bytes of a number."""
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that leave a rank if the ranks form a ring: all-gather passes on the parts of all others,
        all-reduce is a reduce-scatter and an all-gather."""
        others = self.ranks - 1
        times = {"gather": others, "reduce": 2 * others / self.ranks}.get(self.kind, others / self.ranks)
        return times * self.numbers * self.size


Calls = Counter[Call]


def step_calls(shape: Shape, data: int, tensor: int = 1, iterations: int = 1) -> dict[str, Calls]:
    """The calls of a relative step of rank 0, by what they are for.

    ``data`` ranks shard what each of ``tensor`` ranks holds (``fully_shard`` of what is tensor parallel).
    """
    return {
        "vectors": _vector_calls(shape, data),
        "paths": _path_calls(shape, data, tensor),
        "blocks": _block_calls(shape, data, tensor),
        "products": _product_calls(shape, data, tensor, iterations),
        "exchange": _exchange_calls(shape, data, tensor),
    }


OF_ADAM = ("vectors", "paths", "blocks", "products")
OF_MUON = ("vectors", "paths", "blocks", "exchange")


def _vector_calls(shape: Shape, data: int) -> Calls:
    """All vectors are gathered together. Tensor parallel ranks hold the same ones."""
    return _counted(
        [Call("gather", sum(-(-v.rows // data) * v.each * v.count for v in shape.vectors), FLOAT, data)]
    )


def _path_calls(shape: Shape, data: int, tensor: int) -> Calls:
    calls: Calls = Counter()
    for m in shape.matrices:
        if m.parallel == "rows":
            own = -(-m.rows // tensor)
            forward = [Call("gather", -(-own // data), FLOAT, data), Call("gather", own, FLOAT, tensor)]
            backward = [Call("reduce", m.columns, FLOAT, ranks) for ranks in (data, tensor)]
        else:
            own = -(-m.columns // tensor)
            rows = -(-m.rows // data)
            forward = [Call("reduce", rows, FLOAT, tensor), Call("gather", rows, FLOAT, data)]
            backward = [Call("gather", own, FLOAT, tensor), Call("reduce", m.columns, FLOAT, data)]
        for call in _counted([*(forward if m.forward else []), *(backward if m.backward else [])]).elements():
            calls[call] += m.count
    return calls


def _block_calls(shape: Shape, data: int, tensor: int) -> Calls:
    """Norms of weights and of gradients; of what turns <g, u>, norms of g, before and after a step."""
    turning = sum(m.blocks * m.count for m in shape.matrices)
    every = turning + sum(v.blocks * v.count for v in shape.vectors)
    numbers = [(data, every), (data, every), (data, 4 * turning)]
    numbers += [(tensor, turning), (tensor, turning), (tensor, 4 * turning)]
    return _counted(Call("reduce", n, DOUBLE, ranks) for ranks, n in numbers)


def _product_calls(shape: Shape, data: int, tensor: int, iterations: int) -> Calls:
    """A number for each row and each column of every block, by each group of ranks."""
    ends = _rows(shape), _columns(shape)
    once = _counted(Call("reduce", n, FLOAT, ranks) for ranks in (data, tensor) for n in ends)
    return Counter({call: iterations * times for call, times in once.items()})


def _rows(shape: Shape) -> int:
    return sum(m.rows * m.count for m in shape.matrices)


def _columns(shape: Shape) -> int:
    """Of all blocks, each of which has its own vector."""
    return sum(m.columns * m.blocks * m.count for m in shape.matrices)


def _exchange_calls(shape: Shape, data: int, tensor: int) -> Calls:
    """Matrices are put together over the group that cut them last: ``data`` where both cut the rows."""
    sizes = {"data": data, "tensor": tensor}
    last_cuts: dict[tuple[str, ...], list[Matrix]] = {}
    for m in shape.matrices:
        names = ("data", "tensor") if m.parallel == "rows" else ("tensor", "data")
        if m.orthogonal:
            last_cuts.setdefault(tuple(name for name in names if sizes[name] > 1), []).append(m)
    calls: list[Call] = []
    for names, own in last_cuts.items():
        held = sum(local_numel(m, data, tensor) * m.count for m in own)
        calls += _exchange(_blocks(own), held, [sizes[name] for name in names])
    return _counted(calls)


def _blocks(matrices: Iterable[Matrix]) -> list[tuple[int, int]]:
    return [(m.rows // m.blocks, m.columns) for m in matrices for _ in range(m.blocks * m.count)]


def local_numel(m: Matrix, data: int, tensor: int) -> int:
    rows, columns = (
        (-(-m.rows // tensor), m.columns) if m.parallel == "rows" else (m.rows, -(-m.columns // tensor))
    )
    return -(-rows // data) * columns


def _exchange(blocks: list[tuple[int, int]], held: int, groups: Sequence[int]) -> list[Call]:
    """All-to-all to the owners of whole blocks and back; from the innermost group of ranks to the outermost,
    over which what an owner has is a part still."""
    if not groups or not blocks:
        return []
    ranks, *outer = groups
    own = deal(blocks, ranks)[0]
    owned = sum(rows * columns for rows, columns in own) // math.prod(outer)
    there, back = Call("exchange", held, FLOAT, ranks), Call("exchange", owned, FLOAT, ranks)
    return [there, *_exchange(own, owned, outer), back]


def deal(blocks: Iterable[tuple[int, int]], ranks: int) -> list[list[tuple[int, int]]]:
    """By rank, the matrices it orthogonalises: the next most expensive goes to the one with least to do."""
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for cost, block in sorted(((m * n * min(m, n), (m, n)) for m, n in blocks), key=lambda pair: -pair[0]):
        load, rank = loads[0]
        dealt[rank].append(block)
        heapq.heapreplace(loads, (load + cost, rank))
    return dealt


def _counted(calls: Iterable[Call]) -> Calls:
    """A group of one rank is not asked."""
    return Counter(call for call in calls if call.ranks > 1 and call.numbers)


def training_calls(shape: Shape, data: int, tensor: int) -> dict[str, Call]:
    """What fully_shard sends by itself: weights in bf16 twice, for the forward and for the backward pass, and
    gradients in fp32."""
    whole = shape.numel // tensor
    return {
        "gradient": Call("scatter", whole, FLOAT, data),
        "weights": Call("gather", 2 * whole // data, FLOAT // 2, data),
    }


def bytes_sent(calls: Calls) -> float:
    return sum(call.sent * times for call, times in calls.items())


# Memory

COPIES_ADAM = 9.4
"""Copies in fp32 of a rank's part of the parameters at the peak of a step of PathAdam; 0.9 in AdamW's."""
COPIES_MUON, COPIES_OWNED = 6.0, 7.6
"""At the peak of PathMuon's: of the part, and of the matrices that the rank orthogonalises: a fit."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    training: float
    """Weights, gradients and AdamW's state in fp32."""
    state: float
    """Of PathAdam beyond AdamW's: the vectors of spectral norms, three numbers for each block and one for
    each unit."""
    adam: float
    """For the time of a step of PathAdam."""
    muon: float
    """For the time of a step of PathMuon."""


def memory(shape: Shape, data: int, tensor: int) -> Memory:
    part = FLOAT * shape.numel / (data * tensor)
    turning = sum(m.blocks * m.count for m in shape.matrices)
    state = FLOAT * _columns(shape) + DOUBLE * (3 * turning + shape.units + 1)
    owned = [FLOAT * call.numbers for call in step_calls(shape, data, tensor)["exchange"]]
    muon = max(COPIES_ADAM * part, COPIES_MUON * part + COPIES_OWNED * max(owned, default=0))
    return Memory(4 * part, state, COPIES_ADAM * part, muon)


# Tables


def ways(ranks: int) -> list[tuple[int, int]]:
    return [(ranks, 1), *([(ranks // 8, 8)] if ranks > 8 else [])]


def print_tables(size: str) -> None:
    shape = LLAMAS[size].shape()
    sizes = f"{shape.numel / 1e9:.2f}e9 parameters, {shape.orthogonal / 1e9:.2f}e9 of them Muon's"
    print(f"\nLlama {size}: {sizes}\n")
    print(
        "| GPUs | gradient | weights | vectors | paths | blocks | products | Muon, mean | Muon, rank 0 "
        "| calls | ms in calls |"
    )
    print("|---" * 11 + "|")
    for ranks in (8, 64, 256, 1024):
        for data, tensor in ways(ranks):
            print_traffic(shape, data, tensor)
    print(
        "\n| GPUs | weights, gradients, AdamW's state | state beyond | step of PathAdam | step of PathMuon |"
    )
    print("|---" * 5 + "|")
    for ranks in (8, 64, 256, 1024):
        for data, tensor in ways(ranks):
            found = memory(shape, data, tensor)
            cells = [f"{found.training / 1e9:.2f}", f"{found.state / 1e9:.3f}"]
            cells += [f"{x / 1e9:.2f}" for x in (found.adam, found.muon)]
            print(f"| {name_of(data, tensor)} |", " | ".join(cells), "|")


def name_of(data: int, tensor: int) -> str:
    return f"{data} x {tensor}" if tensor > 1 else str(data)


def print_traffic(shape: Shape, data: int, tensor: int) -> None:
    calls = step_calls(shape, data, tensor)
    own = training_calls(shape, data, tensor)
    share = shape.orthogonal // (data * tensor)
    mean = 2 * sum(Call("exchange", share, FLOAT, ranks).sent for ranks in (data, tensor))
    adam = sum(calls[name].total() for name in OF_ADAM)
    cells = [f"{call.sent / 1e6:.0f}" for call in own.values()]
    cells += [f"{bytes_sent(calls[name]) / 1e6:.2f}" for name in OF_ADAM]
    cells += [f"{mean / 1e6:.0f}", f"{bytes_sent(calls['exchange']) / 1e6:.0f}"]
    cells += [str(adam), f"{1e3 * LATENCY * adam:.1f}"]
    print(f"| {name_of(data, tensor)} |", " | ".join(cells), "|")


# Counting


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
    "all_gather_into_tensor": "gather", "all_reduce": "reduce", "all_to_all_single": "exchange",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true")
    arguments = parser.parse_args()
    gpt = step_calls(gpt_shape(768, 12, 8192, 16), 2)
    for name in (*OF_ADAM, "exchange"):
        numbers = sum(call.numbers * call.size * times for call, times in gpt[name].items())
        print(f"GPT 12 x 768 on 2 ranks, {name}: {gpt[name].total()} calls, {numbers / 1e6:.6f} MB")
    for size in LLAMAS:
        print_tables(size)
    if arguments.count:
        for ranks in (64, 1024):
            print_count(LlamaSize(2, 256, 704, 8, 8, 1000), ranks)


def print_count(size: LlamaSize, ranks: int) -> None:
    listed = step_calls(size.shape(), ranks, iterations=FIRST)
    for optimizer, counted in count(size, ranks).items():
        names = OF_ADAM if optimizer == "PathAdam" else OF_MUON
        same = counted == sum((listed[name] for name in names), Counter())
        print(f"{size} on {ranks} ranks, {optimizer}: {counted.total()} calls, as listed: {same}")


if __name__ == "__main__":
    main()
