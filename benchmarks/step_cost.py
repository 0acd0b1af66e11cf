"""What a step costs: the same as ``pathsgd bench``, by argparse, so that torch and Triton are all it needs.

python -m benchmarks.step_cost --device cuda --nets ResNet GPT --json cost.json
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from pathsgd.bench.bench_command import Bench, run


def parse() -> Bench:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = Bench()
    for field in fields(Bench):
        default = getattr(defaults, field.name)
        if isinstance(default, bool):
            parser.add_argument(f"--{field.name}", action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(f"--{field.name}", nargs="*", default=default)
        else:
            kinds = {"seconds": float, "json": Path, "plot": Path, "read": Path}
            parser.add_argument(f"--{field.name}", type=kinds.get(field.name, str), default=default)
    options = vars(parser.parse_args())
    return Bench(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    )


if __name__ == "__main__":
    sys.exit(run(parse()))
