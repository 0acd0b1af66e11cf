"""path_norm replayed from a CUDA graph is that of the eager call in all bits: ``pytest -m gpu``."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from pathsgd.geometry.captured_norm import WARM_UP, CapturedNorm

import pathsgd
from benchmarks.networks import GPT, small_image_resnet
from pathsgd.geometry import captured_norm
from support.networks import NETWORKS, Mlp, Transformer, build

pytestmark = pytest.mark.gpu


def mlp(dtype=torch.float32):
    model, x = build(Mlp, dtype)
    return model.cuda(), x.cuda(), {}


def resnet(dtype=torch.float32):
    torch.manual_seed(0)
    model, x = small_image_resnet().to("cuda", dtype), torch.randn(4, 3, 32, 32, device="cuda", dtype=dtype)
    with torch.no_grad():
        model(x)
    return model.eval(), x, {}


def gpt(dtype=torch.float32):
    torch.manual_seed(0)
    model = GPT(tokens=100, width=64, heads=4, blocks=2, context=32).to("cuda", dtype)
    return model, torch.zeros(1, 32, dtype=torch.int64, device="cuda"), {"region": 1}


KINDS = [mlp, resnet, gpt]


@pytest.fixture
def replays(monkeypatch):
    """Replays are counted, and no gradients are wanted."""
    counted, replay = [], CapturedNorm.replay

    def count(self, network):
        counted.append(replay(self, network))
        return counted[-1]

    monkeypatch.setattr(CapturedNorm, "replay", count)
    with torch.no_grad():
        yield counted


def bits(found):
    return [x.clone() for x in ([found] if torch.is_tensor(found) else found)]


def eager(model, graph, **options):
    with captured_norm._lock:
        return bits(pathsgd.path_norm(model, graph, **options))


def are_equal(found, expected):
    pairs = zip(bits(found), expected, strict=True)
    return all(torch.equal(a, b) and (a.dtype, a.device) == (b.dtype, b.device) for a, b in pairs)


def captured(model, x, **options):
    """The graph of a model, traced unless it is given, whose norm is replayed from now on."""
    graph = pathsgd.trace(model, x)
    for _ in range(WARM_UP):
        found = pathsgd.path_norm(model, graph, **options)
        assert are_equal(found, eager(model, graph, **options))
    assert any(calls.captured is not None for calls in captured_norm._calls[graph].values())
    return graph


@pytest.mark.parametrize("options", [{}, {"log": True}, {"per_output": True}])
@pytest.mark.parametrize("p", [1, 1.5, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_while_weights_are_written(kind, p, options, replays):
    model, x, region = kind()
    options = {**options, **region, "p": p}
    graph = captured(model, x, **options)
    for k in range(4):
        assert are_equal(pathsgd.path_norm(model, graph, **options), eager(model, graph, **options))
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01 * (k + 1))
    assert len(replays) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("network", NETWORKS)
def test_all_kinds_of_layers(network, dtype, replays, monkeypatch):
    # A transposed convolution may add in any order otherwise.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model, x = (thing.cuda() for thing in build(network, dtype))
    options = {"region": 0} if network is Transformer else {}
    graph = captured(model, x, **options)
    for _ in range(3):
        assert are_equal(pathsgd.path_norm(model, graph, **options), eager(model, graph, **options))
        next(model.parameters()).mul_(1.5)
    assert len(replays) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_with_gradients(kind):
    """Captured from calls that are differentiated, too, and replayed to check their range."""
    model, x, options = kind()
    graph = pathsgd.trace(model, x)

    def differentiate():
        norm = pathsgd.path_norm(model, graph, log=True, **options)
        own = [p for p in model.parameters() if p.requires_grad]
        return norm, *torch.autograd.grad(norm, own, allow_unused=True, materialize_grads=True)

    for _ in range(WARM_UP):
        differentiate()
    assert any(calls.captured is not None for calls in captured_norm._calls[graph].values())
    for factor in (1, 1.5, 2.0**80):
        with torch.no_grad():
            next(model.parameters()).mul_(factor)
        found = differentiate()
        with captured_norm._lock:
            expected = differentiate()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert are_equal(pathsgd.path_norm(model, graph, **options), eager(model, graph, **options))


def test_running_statistics_are_those_of_now(replays):
    model, x, _ = resnet()
    graph = captured(model, x)
    before = pathsgd.path_norm(model, graph)
    model.train()(3 * x)
    found = pathsgd.path_norm(model.eval(), graph)
    assert are_equal(found, eager(model, graph))
    assert not torch.equal(found, before)
    assert len(replays) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_moved_weights(kind, replays):
    model, x, options = kind()
    graph = captured(model, x, **options)
    old = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    expected = eager(model, graph, **options)
    for data in old:
        data.fill_(torch.nan)
    for k in range(2 * WARM_UP + 2):
        assert len(replays) == max(0, k - 2 * WARM_UP)
        assert are_equal(pathsgd.path_norm(model, graph, **options), expected)
    model.to(torch.float64)
    assert are_equal(pathsgd.path_norm(model, graph, **options), eager(model, graph, **options))
    model.cpu()
    assert pathsgd.path_norm(model, graph, **options).device.type == "cpu"
    assert len(replays) == 2


@pytest.mark.parametrize("factor", [2.0**-70, 2.0**70])
@pytest.mark.parametrize("kind", [mlp, resnet])
def test_exponents_where_plain_floats_are_not_enough_and_back(kind, factor, replays):
    model, x, _ = kind()
    graph = captured(model, x)
    for each in (factor, 1 / factor, factor, 1 / factor):
        for parameter in list(model.parameters())[-2:]:
            parameter.mul_(each)
        assert are_equal(pathsgd.path_norm(model, graph), eager(model, graph))
    assert [found is None for found in replays] == [True, False, True, False]


def test_dead_units(replays):
    model, x, _ = mlp()
    graph = captured(model, x)
    model[2].weight[0] = model[2].bias[0] = 0
    found = pathsgd.path_norm(model, graph)
    assert are_equal(found, eager(model, graph))
    assert found.isfinite()
    assert replays[-1] is not None


def test_results_are_kept(replays):
    model, x, _ = resnet()
    graph = captured(model, x)
    found, expected = [], []
    for _ in range(4):
        model.head.weight.mul_(2)
        found.append(pathsgd.path_norm(model, graph))
        expected += eager(model, graph)
    assert are_equal(found, expected)
    assert len({x.item() for x in found}) == len(replays) == 4


def test_kinds_of_calls_by_turns(replays):
    """They are computed in the same memory."""
    model, x, _ = resnet()
    graph = pathsgd.trace(model, x)
    kinds = [{}, {"p": 1}, {"log": True}, {"per_output": True}]
    for _ in range(WARM_UP + 3):
        for options in kinds:
            assert are_equal(pathsgd.path_norm(model, graph, **options), eager(model, graph, **options))
    assert len(replays) == 3 * len(kinds)


def test_gradients_after_captured_calls(replays):
    model, x, _ = resnet()
    graph = captured(model, x)
    with torch.enable_grad():
        pathsgd.path_norm(model, graph)
        gradients = []
        for own in (graph, copy.deepcopy(graph)):
            model.zero_grad()
            norm = pathsgd.path_norm(model, own)
            norm.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        assert not replays
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
        model.requires_grad_(False)
        assert are_equal(pathsgd.path_norm(model, graph), eager(model, graph))
    assert len(replays) == 1


def test_inside_and_outside_of_inference_mode(replays):
    model, x, _ = resnet()
    model.requires_grad_(False)  # inference_mode(False) turns gradients on
    for inside in (True, False):
        graph = pathsgd.trace(model, x)
        with torch.inference_mode(inside):
            captured(model, graph)
        for mode in (False, True, False):
            with torch.inference_mode(mode):
                found = pathsgd.path_norm(model, graph)
                assert found.is_inference() == mode
                assert are_equal(found, eager(model, graph))
    assert len(replays) == 6


def test_on_a_side_stream(replays):
    """The replay waits for what the current stream is doing, and so do those who read the result."""
    model, x, _ = mlp()
    graph = captured(model, x)
    expected = []
    for factor in (2.0, 3.0):
        other = copy.deepcopy(model)
        other[0].weight.mul_(factor)
        expected += eager(other, graph)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        model[0].weight.mul_(2)
        found = pathsgd.path_norm(model, graph)
    torch.cuda.current_stream().wait_stream(side)
    assert are_equal(found, expected[:1])
    model[0].weight.mul_(1.5)
    assert are_equal(pathsgd.path_norm(model, graph), expected[1:])
    assert are_equal(found, expected[:1])
    assert len(replays) == 2


@pytest.mark.parametrize("graphs", [1, 2])
def test_two_threads(graphs, replays):
    """On streams of their own, with one graph or each with its own. Of linear layers: cudnn may choose other
    convolutions in another thread."""
    torch.manual_seed(0)
    models = [build(Mlp, torch.float32)[0].cuda() for _ in range(2)]
    models[1][0].weight.mul_(2)
    own = [captured(model, torch.zeros(1, 6, device="cuda")) for model in models[:graphs]]
    own = own if graphs == 2 else own * 2
    models = models if graphs == 2 else models[:1] * 2
    expected = [eager(model, graph) for model, graph in zip(models, own, strict=True)]
    torch.cuda.synchronize()
    wrong = []

    def run(k):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(300):
                if not are_equal(pathsgd.path_norm(models[k], own[k]), expected[k]):
                    wrong.append(k)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert replays


def test_beside_the_steps_of_an_optimizer(replays):
    """gamma is replayed on a second stream, where a norm may be measured at the same time."""
    model, x, _ = resnet()
    graph = pathsgd.trace(model, x)
    optimizer = pathsgd.PathSGD(model, graph, lr=1e-3)
    for _ in range(12):
        optimizer.zero_grad()
        with torch.enable_grad():
            model.train()(x).square().mean().backward()
        optimizer.step()
        assert are_equal(pathsgd.path_norm(model, graph), eager(model, graph))
    assert len(replays) == 12 - WARM_UP


def test_memory_is_freed_with_the_graph(replays):
    def measure():
        model, x, _ = resnet()
        graph = captured(model, x)
        pathsgd.path_norm(model, graph)
        return torch.cuda.memory_reserved()

    def left():
        replays.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    measure()  # cuBLAS keeps a workspace for the stream of captures
    before = left()
    assert measure() > before
    assert left() <= before


def test_the_model_is_not_kept_by_a_capture(replays):
    model, x, _ = resnet()
    graph = captured(model, x)
    parameters, before = sum(p.nbytes for p in model.parameters()), torch.cuda.memory_allocated()
    del model
    gc.collect()
    assert torch.cuda.memory_allocated() <= before - parameters
    assert graph in captured_norm._calls
