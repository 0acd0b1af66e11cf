"""How many runs share a machine, and what is said when its memory is full."""

from __future__ import annotations

import pytest
import torch

from pathsgd.errors import PathError
from pathsgd.paper.api import report_out_of_memory
from pathsgd.paper.training.lanes import choose_lanes


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: out of memory"])
def test_a_gpu_without_memory_is_one_line(text):
    for kind in (torch.OutOfMemoryError, RuntimeError):
        with pytest.raises(PathError, match=f"out of memory: {text}"), report_out_of_memory():
            raise kind(text)
    with pytest.raises(RuntimeError, match="illegal"), report_out_of_memory():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_small_networks_share_a_gpu_and_large_ones_do_not(monkeypatch):
    monkeypatch.setattr("pathsgd.paper.training.lanes._memory_bytes", lambda device: 80e9)
    gpu = torch.device("cuda")
    assert choose_lanes(gpu, 30_000_000, None, ["sgd"]) == 3
    assert choose_lanes(gpu, 3_000_000_000, None, ["sgd"]) == 1
    assert choose_lanes(gpu, 3_000_000_000, 2, ["sgd"]) == 2
    assert choose_lanes(gpu, 1_000, None, ["sgd"], alone=True) == 1
    with pytest.raises(PathError, match="Invalid number of lanes: 17"):
        choose_lanes(gpu, 1_000, 17, ["sgd"])
