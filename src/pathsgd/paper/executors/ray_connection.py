"""The connection to a Ray cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from pathsgd import PathError

SECONDS = 10.0
"""To wait for an answer. Ray itself waits for minutes, and then ends the process."""


@contextmanager
def connect(address: str | None) -> Iterator[None]:
    """Connects to a cluster, or starts one on this machine; a connection that is open already is used.

    Raises:
        PathError: There is no cluster at this address.
    """
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", own):
            raise PathError(f"this process is connected to the Ray cluster at {own} already, not {address}")
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS")
    if where and where not in ("auto", "local"):
        _check_address(where)
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise PathError(f"no connection to Ray: {_make_one_line(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    if address.startswith("ray://"):
        raise PathError(
            f"{address} is Ray Client's: start the command on a node of the cluster, with --address auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise PathError(f"Invalid address of a Ray cluster: {address!r} (HOST:PORT, or auto)")
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
    except (OSError, OverflowError) as error:
        raise PathError(f"no Ray cluster answers at {address} ({error}): --address") from None


def _make_one_line(error: Exception) -> str:
    """What Ray says, without the traceback in it.

    >>> _make_one_line(
    ...     RuntimeError("Failed. Error: Traceback (most recent call last):\\n  in f\\nValueError: x")
    ... )
    'Failed. Error: ValueError: x'
    """
    before, traceback, after = str(error).strip().partition("Traceback (most recent call last):")
    return " ".join([*before.split(), *(after.splitlines()[-1].split() if traceback else [])])
