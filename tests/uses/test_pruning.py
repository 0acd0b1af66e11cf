"""Pruning: the same weights of a network and of its rescaled copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import pathsgd
from benchmarks.uses.pruning import WAYS, lamp, pruned
from support import networks


@pytest.mark.parametrize("way", WAYS)
def test_masks_of_rescaled_copies(way):
    model, x = networks.build(networks.Vgg, torch.float32)
    other = copy.deepcopy(model)
    pathsgd.unbalance(other, x, powers_of_two=True, generator=torch.Generator().manual_seed(0))
    first, second = (pruned(each, x, way, 0.8) for each in (model, other))
    masks = [
        [
            module.weight_mask
            for module in each.modules()
            if prune.is_pruned(module) and hasattr(module, "weight_mask")
        ]
        for each in (first, second)
    ]
    total = sum(mask.numel() for mask in masks[0])
    assert sum(int(mask.sum()) for mask in masks[0]) == total - round(0.8 * total)
    assert all(map(torch.equal, *masks)) == (way not in ("magnitude", "LAMP"))
    if way not in ("magnitude", "LAMP"):
        torch.testing.assert_close(first(x), second(x))


def test_lamp():
    model = nn.Linear(3, 1, bias=False)
    model.weight.data[:] = torch.tensor([[2.0, -1.0, 3.0]])
    (scores,) = lamp(nn.Sequential(model), torch.zeros(1, 3)).values()
    assert scores.flatten().tolist() == pytest.approx([4 / 13, 1 / 14, 9 / 9])
