"""Initial networks, seeds, splits and dropout."""

import dataclasses

import pytest
import torch

from pathsgd import PathError
from study.config import Seeds
from study.training import Trainer, drop_units, make_initial_network, prepare_data
from support.short_runs import CPU, SMALL


def test_seeds_are_apart_from_each_other(training_data):
    def weights(**seeds):
        model, _ = make_initial_network(
            dataclasses.replace(SMALL, init="unbalanced", seed=Seeds(**seeds)), 64, 10
        )
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def points(**seeds):
        training = Trainer(dataclasses.replace(SMALL, dropout=0.5, seed=Seeds(**seeds)), training_data)
        training.train_epoch()
        return training.order_generator.get_state(), training.dropout_generator.get_state()

    assert torch.equal(weights(), weights(order=1, dropout=1, split=1))
    assert not torch.equal(weights(), weights(init=1))
    assert not torch.equal(weights(), weights(rescaling=1))
    assert torch.equal(points()[0], points(init=1, dropout=1)[0])
    assert not torch.equal(points()[0], points(order=1)[0])
    assert not torch.equal(points()[1], points(dropout=1)[1])


def test_dropout_drops_and_scales_forward_and_backward_by_its_own_generator():
    x = torch.rand(100, 200) + 1
    x.requires_grad_()
    before = torch.get_rng_state()
    dropped_x = drop_units(x, 0.2, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)
    kept = dropped_x != 0
    assert abs(kept.float().mean().item() - 0.8) < 0.01
    torch.testing.assert_close(dropped_x[kept], x[kept] / 0.8)
    dropped_x.sum().backward()
    torch.testing.assert_close(x.grad, kept / 0.8)


def test_the_unbalanced_network_is_the_same_function(training_data):
    models = [make_initial_network(dataclasses.replace(SMALL, init=i), 64, 10)[0] for i in
              ("balanced", "unbalanced", "powers-of-two")]  # fmt: skip
    outputs = [model(training_data.train_x[:50]) for model in models]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(models[0][0].weight, models[2][0].weight)


def test_validation_points_are_kept_out(digits):
    split = prepare_data(digits, dataclasses.replace(SMALL, validation=300, centre=False), CPU)
    whole = prepare_data(digits, dataclasses.replace(SMALL, centre=False), CPU)
    assert (len(split.train_y), len(split.evaluated_y)) == (1142, 300)
    both = torch.cat([split.train_x, split.evaluated_x])
    assert torch.equal(both.sum(0), whole.train_x.sum(0))
    centred = prepare_data(digits, dataclasses.replace(SMALL, validation=300), CPU)
    assert centred.train_x.mean(0).abs().max() < 1e-6
    assert centred.evaluated_x.mean(0).abs().max() > 1e-3
    with pytest.raises(PathError, match="has 0 points to train on"):
        prepare_data(digits, dataclasses.replace(SMALL, validation=1442), CPU)
    with pytest.raises(PathError, match="batches have 2000"):
        prepare_data(digits, dataclasses.replace(SMALL, batch=2000), CPU)
