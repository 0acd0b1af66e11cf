"""What torch keeps for the whole process is as it was, whatever threads do."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from benchmarks.networks import stack
from pathsgd import TraceError, _torch, trace
from support.beside import Beside
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


def describe(graph):
    return str(graph), graph.nodes, graph.notes


def export_another():
    torch.export.export(stack(3, 5, 2), (torch.zeros(2, 3),))


def compile_another():
    torch._dynamo.reset()
    torch.compile(stack(3, 5, 2), backend="aot_eager")(torch.zeros(2, 3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("work", [export_another, compile_another])
def test_a_trace_beside_an_export_or_a_compilation(work):
    """Without waiting for each other two of three graphs are others than alone, without a word: what failed
    in one thread was taken for a property of the model. And torch's flags stayed on for good."""
    model, x = stack(4, 8, 3), torch.zeros(4, 4)
    alone = describe(trace(model, x))
    found = []
    with Beside(work) as beside:
        while beside.is_alive() and min(len(found), beside.rounds) < 2:
            found.append(describe(trace(model, x)))
    assert beside.rounds >= 2
    assert found == [alone] * len(found)
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()


class TracesBeside(nn.Sequential):
    """While it is run, another thread traces."""

    def forward(self, x):
        thread = threading.Thread(target=torch.fx.symbolic_trace, args=(nn.ReLU(),))
        thread.start(), thread.join()
        return super().forward(x)


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.started, self.goes_on = threading.Event(), threading.Event()

    def forward(self, x):
        self.started.set()
        self.goes_on.wait()
        return x + 1


def test_what_cannot_be_waited_for_is_an_error(monkeypatch):
    with pytest.raises(TraceError, match=r"another thread is inside .*torch\.fx.*pass the graph"):
        trace(TracesBeside(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(1, 2))
    monkeypatch.setattr(_torch, "LONGEST_WAIT", 0.05)
    model = Waits()
    thread = threading.Thread(target=torch.export.export, args=(model, (torch.zeros(1, 2),)))
    thread.start()
    model.started.wait()
    with pytest.raises(TraceError, match="another thread is inside"):
        trace(stack(2, 3, 1), torch.zeros(1, 2))
    model.goes_on.set()
    thread.join()
