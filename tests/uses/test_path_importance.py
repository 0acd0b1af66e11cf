"""path_importance: what the path norm loses with a weight, and masks that rescaling does not change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import pathsgd
from support import cases, networks


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("case", [cases.Mlp, cases.ConvPool, cases.Residual])
def test_is_what_the_norm_loses_without_the_weight(case, p):
    model, graph = cases.build(case), cases.traced(case)
    model.requires_grad_(False)
    whole = pathsgd.path_norm(model, graph, p) ** p
    for (module, name), scores in pathsgd.path_importance(model, graph, p).items():
        weight = getattr(module, name).data
        for index in torch.randperm(weight.numel())[:12]:
            kept = weight.view(-1)[index].clone()
            weight.view(-1)[index] = 0
            lost = 1 - pathsgd.path_norm(model, graph, p) ** p / whole
            weight.view(-1)[index] = kept
            assert float(scores.view(-1)[index]) == pytest.approx(float(lost), rel=1e-9, abs=1e-12)


def masks(model, x, p=2):
    scores = pathsgd.path_importance(model, x, p)
    prune.global_unstructured(list(scores), prune.L1Unstructured, importance_scores=scores, amount=0.6)
    return [getattr(module, f"{name}_mask") for module, name in scores]


@pytest.mark.parametrize("powers_of_two", [True, False])
@pytest.mark.parametrize("network", [networks.SmallResNet, networks.Vgg, networks.Transformer])
def test_masks_of_rescaled_copies_are_the_same(network, powers_of_two):
    """By powers of two to the bit of every score; by other factors no two scores here are close enough."""
    model, _ = networks.build(network, torch.float32)
    copied, graph = copy.deepcopy(model), networks.traced(network, torch.float32)
    generator = torch.Generator().manual_seed(0)
    pathsgd.unbalance(copied, graph, powers_of_two=powers_of_two, generator=generator)
    if powers_of_two:
        scores = (pathsgd.path_importance(each, graph).values() for each in (model, copied))
        assert all(map(torch.equal, *scores))
    magnitude = prune_by_magnitude(copy.deepcopy(model)), prune_by_magnitude(copy.deepcopy(copied))
    assert not all(map(torch.equal, *magnitude))
    assert all(map(torch.equal, masks(model, graph), masks(copied, graph)))


def prune_by_magnitude(model):
    layers = [(m, "weight") for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.6)
    return [module.weight_mask for module, _ in layers]


def test_layers_that_all_paths_cross_sum_to_one():
    model = nn.Sequential(
        nn.Linear(4, 64, bias=False), nn.ReLU(), nn.Linear(64, 2, bias=False), nn.GELU(), nn.Linear(2, 3)
    )
    totals = [float(scores.sum()) for scores in pathsgd.path_importance(model).values()]
    assert totals[:2] == pytest.approx([1, 1])
    assert totals[2] < 1  # its biases are paths, too


def test_dead_weights_have_none():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight[:, 1] = 0
    first, _ = pathsgd.path_importance(model).values()
    assert not first[1].any()
    assert first[0].all()


def test_what_was_pruned_before_is_pruned_further():
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 6)
    for zeros in (36, 54):
        scores = pathsgd.path_importance(model, x)
        assert [name for _, name in scores] == ["weight", "weight"]
        options = {"importance_scores": scores, "amount": 0.5}
        prune.global_unstructured(list(scores), prune.L1Unstructured, **options)
        assert sum(int((module.weight == 0).sum()) for module in (model[0], model[2])) == zeros


def test_without_a_live_path_nothing_is_important():
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    nn.init.zeros_(model[2].weight)
    assert not any(scores.any() for scores in pathsgd.path_importance(model).values())
