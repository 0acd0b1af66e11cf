"""The experiments' training on a GPU: run by hand on a machine with one, ``python tests/on_gpu_training.py``.

For every method: a step replayed from its CUDA graph against the same step taken at once, the curve against
the CPU's, a run taken up again against one that was not interrupted, and several runs at a time in threads
against each alone. Prints one line each and the count.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from pathsgd.paper.config import Run  # noqa: E402
from pathsgd.paper.data.dataset import Dataset  # noqa: E402
from pathsgd.paper.experiment.problem import problem_of  # noqa: E402
from pathsgd.paper.experiment.streams import own_streams  # noqa: E402
from pathsgd.paper.experiment.training import Training  # noqa: E402
from pathsgd.paper.optimizers import METHODS  # noqa: E402

GPU, CPU = torch.device("cuda"), torch.device("cpu")
STEP_SIZES = {"sgd": 0.05, "momentum": 0.01, "path-sgd": 0.02, "path-momentum": 0.002, "muon": 0.01}
"""At which each learns; the others are adaptive."""
ADAPTIVE = 1e-3
EPOCHS = 4


def clusters() -> Dataset:
    """Ten clouds that overlap."""
    random = torch.Generator().manual_seed(0)
    y = torch.randint(10, (3_000,), generator=random)
    centres = torch.randint(40, 216, (10, 100), generator=random)
    noise = 60 * torch.randn(len(y), 100, generator=random)
    x = (centres[y] + noise).clamp(0, 255).to(torch.uint8)
    return Dataset("clusters", (100,), 10, x[:2_500], y[:2_500], x[2_500:], y[2_500:])


def run_of(name: str, dropout: float = 0.0) -> Run:
    return Run(
        dataset="clusters", method=name, step_size=STEP_SIZES.get(name, ADAPTIVE), hidden=(129, 257),
        dropout=dropout, batch=50, init="unbalanced" if METHODS[name].invariant else "balanced",
    )  # fmt: skip


def curve(training: Training, epochs: int = EPOCHS) -> list[float]:
    return [training.epoch().loss for _ in range(epochs)]


def at_once(training: Training) -> list[float]:
    """The same epochs without a graph."""
    training._replay = (
        lambda points: [  # type: ignore[method-assign]
            training.step(points[k : k + 50], torch.arange(k, k + 50, device=GPU))
            for k in range(0, 2_500, 50)
        ]
    )
    return curve(training)


def apart(found: list[float], expected: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


def main() -> None:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    data = clusters()
    here, there = problem_of(data, run_of("sgd"), CPU), problem_of(data, run_of("sgd"), GPU)
    done = failed = 0

    def check(label: str, found: list[float], expected: list[float], bound: float) -> None:
        nonlocal done, failed
        gap = apart(found, expected)
        learned = expected[-1] < 0.9 * expected[0]
        good = gap <= bound and learned
        done, failed = done + good, failed + (not good)
        note = "" if good else f"   FAILED: bound {bound:.0e}, losses {expected[0]:.3g} to {expected[-1]:.3g}"
        print(f"{label:60} {gap:.1e}{note}", flush=True)

    alone = {}
    for name in METHODS:
        for dropout in (0.0, 0.5):
            run = run_of(name, dropout)
            alone[run] = curve(Training(run, there))
            check(f"{run.method}, dropout {dropout}: replayed, at once", alone[run],
                  at_once(Training(run, there)), 1e-5)  # fmt: skip
        run = run_of(name)
        # Two epochs: later a loss is so small that it shows how each device rounds. Muon multiplies in bf16.
        check(
            f"{name}: GPU, CPU",
            alone[run][:2],
            curve(Training(run, here), 2),
            3e-2 if name == "muon" else 1e-4,
        )
        first = Training(run_of(name, 0.5), there)
        begun = curve(first, 2)
        resumed = Training(run_of(name, 0.5), there)
        resumed.load_state_dict(first.state_dict())
        check(f"{name}: taken up again, uninterrupted", begun + curve(resumed, EPOCHS - 2),
              alone[run_of(name, 0.5)], 1e-5)  # fmt: skip

    def aside(run: Run) -> list[float]:
        with own_streams(GPU) as recording:
            return curve(Training(run, there, recording))

    with ThreadPoolExecutor(3) as pool:
        for run, found in zip(alone, pool.map(aside, alone), strict=True):
            check(f"{run.method}, dropout {run.dropout}: three at a time, alone", found, alone[run], 1e-5)
    print(f"{done} passed, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
