"""Runs files as ``python FILE`` does, but in processes that have imported already what takes longer."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from multiprocessing import forkserver

import torch


def start_server(modules, environment):
    """The process that the others are forked from: with these modules, in this environment."""
    before = dict(os.environ)
    os.environ.update(environment, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    try:
        forkserver.set_forkserver_preload(modules)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_file(file, folder, printed, seconds=300):
    """Its exit code. What it prints goes to the file ``printed``, errors included."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(str(file), str(folder), str(printed)))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode


def _run(file, folder, printed):
    os.chdir(folder)
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    sys.argv = [file]
    runpy.run_path(file, run_name="__main__")
