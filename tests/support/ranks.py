"""Functions run on several processes at once, which talk to each other by gloo.

``run_on_ranks(function)`` calls a function of a test file in every process and returns what each returned.
The processes are forked from one that has imported torch and called ``prepare()`` of that file, if it has
one: that takes longer than most of these tests.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 300
"""After which a test that hangs, as one whose ranks wait for each other, is ended."""


def run_on_ranks(function, world=2):
    """What ``function()`` returns on each rank: tensors, numbers, strings, lists and dicts of them."""
    file = sys.modules[function.__module__].__file__
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, file, function.__name__, str(world), folder],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(world)]


def _load(file):
    spec = importlib.util.spec_from_file_location("ranks_test", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ranks_test"] = module
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    getattr(module, "prepare", lambda: None)()
    return module


def _call(function, rank, world, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(function(), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def main(file, name, world, folder):
    function, children = getattr(_load(file), name), []
    for rank in range(int(world)):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _call(function, rank, int(world), folder)
                status = 0
            except BaseException:
                print(f"rank {rank}:", traceback.format_exc(), file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        children.append(child)
    failed = 0
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not failed:
            failed = 1
            for other in children:  # they would wait for it
                os.kill(other, 9)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
