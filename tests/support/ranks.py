"""Functions run on several processes at once, which talk to each other by gloo.

``run_on_ranks(function)`` calls a function of a test file in every process and returns what each returned.
The processes are forked from one that has imported torch and called ``prepare()`` of that file, if it has
one: that takes longer than most of these tests. It stays there for the tests after it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 200
"""After which a test that hangs, as one whose ranks wait for each other, is ended."""


def run_on_ranks(function, world=2, *arguments, kill_at=()):
    """Calls ``function(*arguments)`` on each rank; it returns tensors, numbers, strings, lists and dicts.

    Args:
        function: at the top of its file.
        world: the number of ranks.
        arguments: strings.
        kill_at: paths of files. Soon after the first is there one of the ranks is killed (kill -9), the
            others are ended, and all are started again, as torchrun does; so with the next.
    """
    with tempfile.TemporaryDirectory() as folder:
        _server().ask(
            file=sys.modules[function.__module__].__file__, name=function.__name__, world=world,
            arguments=arguments, kill_at=list(map(str, kill_at)), folder=folder,
        )  # fmt: skip
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(world)]


class _Server:
    """The process that ranks are forked from."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.process.communicate)

    def ask(self, **request):
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer == "done\n", json.loads(answer) if answer else "the process that forks has died"


_server = functools.cache(_Server)


# In that process


def serve():
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                failed = _run(**request)
            except BaseException:
                traceback.print_exc()
                failed = True
            sys.stdout.flush()
            sys.stderr.flush()
            output.seek(0)
            text = output.read().decode(errors="replace")
        print(json.dumps(text) if failed else "done", file=answers, flush=True)


@functools.cache
def _load(file):
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    getattr(module, "prepare", lambda: None)()
    gc.collect()
    gc.freeze()  # ranks would go through all that was imported again and again, and so copy it
    return module


def _run(file, name, world, arguments, kill_at, folder):
    """Whether it failed."""
    function = functools.partial(getattr(_load(file), name), *arguments)
    end = time.monotonic() + SECONDS
    for life, path in enumerate([*kill_at, None]):
        ranks = [_start(function, rank, world, folder, f"{folder}/store{life}") for rank in range(world)]
        if path is None:
            return any(_wait(ranks, end).values())
        _wait_for(path, end)
        os.kill(ranks[-1], signal.SIGKILL)
        assert os.WIFSIGNALED(_wait(ranks, end)[ranks[-1]]), "it had come to its end"
    return None


def _start(function, rank, world, folder, store):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        torch.save(function(), Path(folder, f"{rank}.pt"))
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        print(f"rank {rank}:", traceback.format_exc(), file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _wait_for(path, end):
    """Waits for the file, and some moments more; not if a rank has failed."""
    look = os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not Path(path).exists() and os.waitid(*look) is None and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.02))


def _wait(ranks, end):
    """Waits for all to end; the status of each. Those that would wait for one that failed are ended, too."""
    left, statuses = set(ranks), {}
    while left and not any(statuses.values()) and time.monotonic() < end:
        child, statuses[child] = os.waitpid(-1, os.WNOHANG)
        left.discard(child)
        if child == 0:
            time.sleep(0.01)
    for rank in left:
        os.kill(rank, signal.SIGKILL)
        statuses[rank] = os.waitpid(rank, 0)[1]
    if time.monotonic() > end:
        print(f"not done after {SECONDS} seconds")
    return statuses


if __name__ == "__main__":
    serve()
