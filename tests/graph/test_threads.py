"""What torch keeps for the whole process is as it was, whatever threads do."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from benchmarks.networks import stack
from pathsgd import trace
from support.old_torch import needs_torch


@pytest.fixture(autouse=True)
def often():
    """Threads change all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_networks_can_be_traced_by_several_threads():
    before = torch.backends.mkldnn.enabled
    widths = [(4, 8, 3), (5, 9, 2), (6, 7, 4)]
    with ThreadPoolExecutor(3) as pool:
        graphs = list(pool.map(lambda own: trace(stack(*own), torch.zeros(1, own[0])), 3 * widths))
    assert [str(graph) for graph in graphs] == [
        str(trace(stack(*own), torch.zeros(1, own[0]))) for own in 3 * widths
    ]
    assert torch.backends.mkldnn.enabled == before


class ReckonsWithFlags(nn.Module):
    """As models of the transformers library do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        exporting = False
        exporting |= torch.compiler.is_exporting()
        plain = torch.compiler.is_compiling() == False  # noqa: E712
        return self.layer(x) if exporting or plain else x


@needs_torch(2, 7, "torch.compiler.is_exporting")
def test_a_model_may_reckon_with_the_flag_of_export():
    assert trace(ReckonsWithFlags(), torch.ones(1, 2)).parameters["layer.weight"].roles == ("weight",)
