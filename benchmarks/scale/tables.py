"""The tables of docs/scale.md."""

from __future__ import annotations

from dataclasses import dataclass

from .calls import DOUBLE, FLOAT, OF_ADAM, Call, bytes_sent, columns, step_calls, training_calls
from .shapes import LLAMAS, Shape

LATENCY = 20e-6
"""Seconds that a call takes however little it sends, as a rule of thumb."""

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
    state = FLOAT * columns(shape) + DOUBLE * (3 * turning + shape.units + 1)
    owned = [FLOAT * call.numbers for call in step_calls(shape, data, tensor)["exchange"]]
    muon = max(COPIES_ADAM * part, COPIES_MUON * part + COPIES_OWNED * max(owned, default=0))
    return Memory(4 * part, state, COPIES_ADAM * part, muon)


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
