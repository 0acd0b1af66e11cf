"""The command line."""

from __future__ import annotations

import argparse
from collections import Counter

from pathsgd.optim.relative.spectral import FIRST

from . import __doc__ as about
from .calls import OF_ADAM, OF_MUON, step_calls
from .counting import count
from .shapes import LLAMAS, LlamaSize, gpt_shape
from .tables import print_tables


def main() -> None:
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
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
