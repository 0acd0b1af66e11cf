"""CPU and CUDA agree: run by hand on a machine with a GPU, ``python tests/on_gpu.py``.

Every case in fp64 (to 1e-12) and every network in fp32 and bf16, plain and with exponents, norms and
gamma, rescaled and balanced on the GPU. Prints one line each and ends with the count.
"""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks"), str(HERE.parent / "src")]

import pathsgd  # noqa: E402
from pathsgd.geometry.gamma import measure_gammas  # noqa: E402
from support import (
    cases,
    networks,
)


def worst(found, expected):
    """The largest relative difference of two sets of scales, in the logarithm (range is no matter)."""
    largest = 0.0
    for name, gamma in expected.items():
        a, b = found[name].log2().cpu(), gamma.log2()
        same = torch.isinf(a) == torch.isinf(b)
        assert same.all(), f"{name}: dead on one device only"
        alive = torch.isfinite(b)
        if alive.any():
            largest = max(largest, (a - b)[alive].abs().max().item() * math.log(2))
    return largest


def agree(label, model, x, bound):
    there = copy.deepcopy(model).cuda()
    graph = pathsgd.trace(model, x)
    on_gpu = pathsgd.trace(there, x.cuda())
    assert str(graph) == str(on_gpu)
    largest = 0.0
    for p in (1, 1.5, 2, 4, math.inf):
        for exponents in (False, True):
            expected = measure_gammas(graph, graph.tensors(model), p, exponents=exponents)
            found = measure_gammas(on_gpu, on_gpu.tensors(there), p, exponents=exponents)
            largest = max(largest, worst(found, expected))
    assert largest <= bound, f"{label}: {largest}"
    print(f"{label:32} gamma agrees to {largest:.1e}")


def rescales(label, model, x):
    model, x = model.cuda(), x.cuda()
    graph = pathsgd.trace(model, x)
    original, before = copy.deepcopy(model), model(x).detach()
    pathsgd.unbalance(model, graph)
    assert pathsgd.rescaling_equivalent(original, model, graph)
    pathsgd.balance(model, graph)
    gap = ((model(x) - before).abs().max() / before.abs().max()).item()
    assert gap <= 1e-10, f"{label}: {gap}"
    print(f"{label:32} unbalanced and balanced on the GPU, outputs differ by {gap:.1e}")


def main():
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    done = 0
    for case in cases.CASES:
        model = cases.build(case)
        agree(case.__name__, model, model.example(), 1e-12)
        done += 1
    for network in networks.NETWORKS:
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 1e-4)):
            model, x = networks.build(network, dtype)
            agree(f"{network.__name__} {dtype}", model, x, bound)
            done += 1
        rescales(network.__name__, *networks.build(network))
        done += 1
    print(f"{done} passed, 0 failed")


if __name__ == "__main__":
    main()
