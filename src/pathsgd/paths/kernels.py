"""Path-SGD on a chain of linear layers on a GPU: a few launches a step, and no copies of the weights.

A table has a row for every layer, in 64 bits each: addresses of weight, gradient and momentum, of the bias
and its own, then the numbers of rows and columns, and where the layer's vectors and partial sums begin. All
sums are in fp64, in an order that is always the same.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from pathsgd._torch import is_capturing
from pathsgd.paths.chain import Chain, Moves, Rule, order_sums
from pathsgd.paths.model_gammas import CHECK_EVERY
from pathsgd.training.capture import WARM_UP, AddressTable, CUDAGraph, capture, free_after_capture, on_device

ROWS: tl.constexpr = tl.constexpr(64)
MOVED_ROWS: tl.constexpr = tl.constexpr(16)
COLUMNS: tl.constexpr = tl.constexpr(128)
"""The tile of a matrix that one program sums over, and that which it moves."""
WARPS = 4
ENTRIES: tl.constexpr = tl.constexpr(32)
PARTS: tl.constexpr = tl.constexpr(64)
"""Entries of a vector that one program finishes, and the partial sums that it reads at once."""
FIELDS: tl.constexpr = tl.constexpr(12)
ADDRESSES = 6
ALIGNED = 16
"""Bytes of one access."""
INTO_ROWS, FROM_COLUMNS = 1, 2
"""Flags for what a tile is read for: sums over columns, for gamma_in of the rows; over rows, for gamma_out of
the columns."""
MAX_ROOT = 2.0**110
"""The largest 1 / sqrt(gamma), and the inverse of the least, that is left to kernels: fp32 holds them."""


@triton.jit
def _raise(x, P: tl.constexpr):
    if P == 1:
        return tl.abs(x)
    x = x * x
    if P == 4:
        x = x * x
    return x


@triton.jit
def _invert_root(x, P: tl.constexpr):
    """``x^(-1/p)``, 0 for 0."""
    root = tl.where(x > 0, x, 1.0)
    if P >= 2:
        root = tl.sqrt(root)
    if P == 4:
        root = tl.sqrt(root)
    return tl.where(x > 0, 1.0 / root, 0.0)


@triton.jit
def _pointer(row, field: tl.constexpr, EVEN: tl.constexpr):
    pointer = tl.load(row + field).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if EVEN else pointer


@triton.jit
def _load_columns(row, EVEN: tl.constexpr):
    """The number of columns; EVEN: a multiple of four in all layers, so that four are read together."""
    columns = tl.load(row + 7)
    return tl.multiple_of(columns, 4) if EVEN else columns


@triton.jit
def sum_kernel(table, tiles, vectors, parts, P: tl.constexpr, EVEN: tl.constexpr):
    """Sums of ``|w|^p gamma`` over a tile, by row and by column."""
    tile = tiles + 4 * tl.program_id(0)
    row = table + tl.load(tile) * FIELDS
    first, start, wanted = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    rows, columns = tl.load(row + 6), _load_columns(row, EVEN)
    r = first + tl.arange(0, ROWS)
    c = tl.multiple_of(start, 4) + tl.arange(0, COLUMNS)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    w = tl.load(_pointer(row, 0, EVEN) + r[:, None] * columns + c[None, :], inside, 0.0)
    powers = _raise(w.to(tl.float64), P)
    if wanted & 1:
        into = tl.load(vectors + tl.load(row + 8) + c, c < columns, 0.0)
        at_rows = parts + tl.load(row + 10) + (start // COLUMNS) * rows + r
        tl.store(at_rows, tl.sum(powers * into[None, :], 1), r < rows)
    if wanted & 2:
        out = tl.load(vectors + tl.load(row + 9) + r, r < rows, 0.0)
        at_columns = parts + tl.load(row + 11) + (first // ROWS) * columns + c
        tl.store(at_columns, tl.sum(powers * out[:, None], 0), c < columns)


@triton.jit
def finish_kernel(table, places, vectors, parts, P: tl.constexpr):
    """Adds up the partial sums of some entries of a vector, and the bias that leads to them."""
    place = places + 6 * tl.program_id(0)
    row = table + tl.load(place) * FIELDS
    source, count, length = tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    k = tl.load(place + 5) + tl.arange(0, ENTRIES)
    total = tl.zeros([ENTRIES], tl.float64)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < count)[:, None] & (k < length)[None, :]
        total += tl.sum(tl.load(parts + source + part[:, None] * length + k[None, :], inside, 0.0), 0)
    bias = tl.load(row + 3)
    if (source == tl.load(row + 10)) & (bias != 0):
        b = tl.load(bias.to(tl.pointer_type(tl.float32)) + k, k < length, 0.0)
        total += _raise(b.to(tl.float64), P)
    tl.store(vectors + tl.load(place + 4) + k, total, k < length)


@triton.jit
def _move(w_at, g_at, m_at, inside, root, lr, shrink, momentum, MOMENTUM: tl.constexpr,
          NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr):  # fmt: skip
    """The formula of paths/rule.py, with 1 / sqrt(gamma) in fp32."""
    w, u = tl.load(w_at, inside, 0.0), tl.load(g_at, inside, 0.0) * root
    if MAXIMIZE:
        u = -u
    if MOMENTUM:
        m = momentum * tl.load(m_at, inside, 0.0) + u
        tl.store(m_at, m, inside)
        u = u + momentum * m if NESTEROV else m
    tl.store(w_at, shrink * w - lr * (u * root), inside)


@triton.jit
def _load_number(at):
    return tl.load(at).to(tl.float32)


@triton.jit
def move_kernel(table, tiles, vectors, rates, P: tl.constexpr, EVEN: tl.constexpr,
                MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr):  # fmt: skip
    """A step of one tile of a matrix, and of the biases beside its first column. ``rates`` has momentum, then
    for every layer lr and what decay leaves, of its weights and of its biases."""
    tile = tiles + 4 * tl.program_id(0)
    layer = tl.load(tile)
    row, first, start = table + layer * FIELDS, tl.load(tile + 1), tl.load(tile + 2)
    rows, columns = tl.load(row + 6), _load_columns(row, EVEN)
    r = first + tl.arange(0, MOVED_ROWS)
    c = tl.multiple_of(start, 4) + tl.arange(0, COLUMNS)
    at = r[:, None] * columns + c[None, :]
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    at_rows = _invert_root(tl.load(vectors + tl.load(row + 9) + r, r < rows, 0.0), P)
    at_columns = _invert_root(tl.load(vectors + tl.load(row + 8) + c, c < columns, 0.0), P)
    numbers, factor = rates + 1 + 4 * layer, _load_number(rates)
    root = (at_rows[:, None] * at_columns[None, :]).to(tl.float32)
    w, g, m = _pointer(row, 0, EVEN) + at, _pointer(row, 1, EVEN) + at, _pointer(row, 2, EVEN) + at
    lr, shrink = _load_number(numbers), _load_number(numbers + 1)
    _move(w, g, m, inside, root, lr, shrink, factor, MOMENTUM, NESTEROV, MAXIMIZE)
    if (start == 0) & (tl.load(row + 3) != 0):
        b, b_g, b_m = _pointer(row, 3, False) + r, _pointer(row, 4, False) + r, _pointer(row, 5, False) + r
        b_lr, b_shrink = _load_number(numbers + 2), _load_number(numbers + 3)
        b_root = at_rows.to(tl.float32)
        _move(b, b_g, b_m, r < rows, b_root, b_lr, b_shrink, factor, MOMENTUM, NESTEROV, MAXIMIZE)


class KernelChain:
    """See :class:`pathsgd.paths.chain.ChainStep`."""

    def __init__(self, chain: Chain, device: torch.device) -> None:
        self.device = device
        self._has_even_columns = all(layer.inputs % 4 == 0 for layer in chain)
        self.is_even = False
        """Whether four numbers can be read together everywhere."""
        vectors = [n for layer in chain for n in (layer.inputs, layer.outputs)]
        tiles = [(-(-a.outputs // ROWS.value), -(-a.inputs // COLUMNS.value)) for a in chain]
        parts = [n for a, (i, j) in zip(chain, tiles, strict=True) for n in (j * a.outputs, i * a.inputs)]
        at, sums = [0, *accumulate(vectors)], [0, *accumulate(parts)]
        fields = [
            [0] * ADDRESSES + [a.outputs, a.inputs, at[2 * k], at[2 * k + 1], sums[2 * k], sums[2 * k + 1]]
            for k, a in enumerate(chain)
        ]
        self.table = AddressTable(torch.tensor(fields), device)
        self.vectors = torch.ones(at[-1], dtype=torch.float64, device=device)
        self.parts = torch.empty(sums[-1], dtype=torch.float64, device=device)
        self.rounds = []
        for layers in order_sums(len(chain)):
            read, finished = [], []
            for k, (rows, columns) in layers.items():
                wanted = INTO_ROWS * rows + FROM_COLUMNS * columns
                read += [[k, *tile, wanted] for tile in _list_tiles(chain[k].outputs, chain[k].inputs)]
                if rows:
                    finished += _list_entries(k, sums[2 * k], tiles[k][1], chain[k].outputs, at[2 * k + 2])
                if columns:
                    finished += _list_entries(k, sums[2 * k + 1], tiles[k][0], chain[k].inputs, at[2 * k - 1])
            self.rounds.append((self._put(read), self._put(finished)))
        moved = [
            [k, *tile, 0]
            for k, a in enumerate(chain)
            for tile in _list_tiles(a.outputs, a.inputs, MOVED_ROWS.value)
        ]
        self.tiles = self._put(moved[::-1])  # what was read last may be in the cache still
        self.rates = torch.zeros(1 + 4 * len(chain), dtype=torch.float64, device=device)
        self._numbers: list[float] | None = None
        self._captured: list[Tensor] = []
        free_after_capture(self, self._captured)
        self._steps, self._fits = 0, True
        self._graphs: dict[tuple[Rule, bool], CUDAGraph] = {}

    def _put(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64).to(self.device)

    def measure(self, moves: Moves, p: int) -> bool:
        """Sums are taken with the step; from time to time, they are looked at before."""
        self._point(moves)
        if is_capturing():
            return True
        self._steps += 1
        if self._steps % CHECK_EVERY == 1 or not self._fits:
            with on_device(self.device):
                self._sum(p)
            self._fits = all(self._holds_roots(row, p) for row in self.table.fields[:, 6:10].tolist())
        return self._fits

    def _holds_roots(self, row: list[int], p: int) -> bool:
        outputs, inputs, into, out = row
        vectors = self.vectors[into : into + inputs], self.vectors[out : out + outputs]
        (least_in, most_in), (least_out, most_out) = (torch.where(x > 0, x, 1.0).aminmax() for x in vectors)
        ends = torch.stack([least_in * least_out, most_in * most_out, least_out, most_out]).tolist()
        bound = MAX_ROOT**p
        return all(1 / bound < x < bound for x in ends)

    def move(self, moves: Moves, rule: Rule) -> None:
        self._set_rates(moves, rule)
        with on_device(self.device):
            if is_capturing() or self._steps <= WARM_UP or self.device.type != "cuda":
                self._launch(rule)
            else:
                key = rule, self.is_even
                if key not in self._graphs:
                    self._graphs[key], _ = capture(lambda: self._launch(rule), self.device)
                self._graphs[key].replay()
        # As torch does when it writes.
        torch.autograd.graph.increment_version([m.parameter for own in moves for m in own if m is not None])

    def _launch(self, rule: Rule) -> None:
        self._sum(rule.p)
        move_kernel[(len(self.tiles),)](
            self.table.on_device, self.tiles, self.vectors, self.rates, P=rule.p,
            EVEN=self.is_even, MOMENTUM=rule.momentum != 0, NESTEROV=rule.nesterov, MAXIMIZE=rule.maximize,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip

    def _sum(self, p: int) -> None:
        for read, finished in self.rounds:
            arguments = self.vectors, self.parts
            sum_kernel[(len(read),)](
                self.table.on_device, read, *arguments, P=p, EVEN=self.is_even, num_warps=WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
            finish_kernel[(len(finished),)](self.table.on_device, finished, *arguments, P=p)

    def _point(self, moves: Moves) -> None:
        addresses: list[int] = []
        for own in moves:
            for m in own:
                tensors = (
                    [] if m is None else [m.parameter, m.grad, m.parameter if m.buffer is None else m.buffer]
                )
                addresses += [t.data_ptr() for t in tensors] or [0, 0, 0]
        self.table.point(addresses, ADDRESSES, lambda by_layer: by_layer)
        self.is_even = self._has_even_columns and all(address % ALIGNED == 0 for address in addresses)

    def _set_rates(self, moves: Moves, rule: Rule) -> None:
        """Tells the kernels rates and decay, by one copy for which the host does not wait."""
        numbers, tensors = [rule.momentum], []
        for own in moves:
            for m in own:
                lr = 0.0 if m is None or isinstance(m.lr, Tensor) else float(m.lr)
                if m is not None and isinstance(m.lr, Tensor):
                    tensors.append((len(numbers), m))
                numbers += [lr, 1 - lr * m.weight_decay if m is not None else 1.0]
        if numbers != self._numbers or is_capturing():
            on_gpu = self.device.type == "cuda"
            values = torch.tensor(numbers, dtype=torch.float64, pin_memory=on_gpu)
            self.rates.copy_(values, non_blocking=True)
            if is_capturing():
                self._captured.append(values)  # a replay copies it again
            self._numbers = None if is_capturing() else numbers
        for k, m in tensors:
            self.rates[k] = m.lr
            self.rates[k + 1] = 1 - m.lr * m.weight_decay


def _list_tiles(rows: int, columns: int, step: int = ROWS.value) -> list[list[int]]:
    return [[r, c] for r in range(0, rows, step) for c in range(0, columns, COLUMNS.value)]


def _list_entries(layer: int, source: int, count: int, length: int, target: int) -> list[list[int]]:
    return [[layer, source, count, length, target, k] for k in range(0, length, ENTRIES.value)]
