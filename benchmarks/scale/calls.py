"""Every call of torch.distributed that a relative step makes, listed by :func:`step_calls`.

``tests/distributed/test_sharded_traffic.py`` compares the list with the calls of rank 0, one by one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pathsgd.optim.relative.sharded import cost_of, deal

from .shapes import Matrix, Shape

FLOAT, DOUBLE = 4, 8


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
    """Norms of weights and of gradients; of what turns <g, u>, norms before and after a step."""
    turning = sum(m.blocks * m.count for m in shape.matrices)
    every = turning + sum(v.blocks * v.count for v in shape.vectors)
    numbers = [(data, every), (data, every), (data, 3 * turning)]
    numbers += [(tensor, turning), (tensor, turning), (tensor, 3 * turning)]
    return _counted(Call("reduce", n, DOUBLE, ranks) for ranks, n in numbers)


def _product_calls(shape: Shape, data: int, tensor: int, iterations: int) -> Calls:
    """A number for each row and each column of every block, by each group of ranks."""
    ends = _rows(shape), columns(shape)
    once = _counted(Call("reduce", n, FLOAT, ranks) for ranks in (data, tensor) for n in ends)
    return Counter({call: iterations * times for call, times in once.items()})


def _rows(shape: Shape) -> int:
    return sum(m.rows * m.count for m in shape.matrices)


def columns(shape: Shape) -> int:
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
    own = [blocks[k] for k in deal([cost_of(*block) for block in blocks], ranks)[0]]
    owned = sum(rows * columns for rows, columns in own) // math.prod(outer)
    there, back = Call("exchange", held, FLOAT, ranks), Call("exchange", owned, FLOAT, ranks)
    return [there, *_exchange(own, owned, outer), back]


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
