"""Averages of a model, optimizers of some of its parameters, and weights that are computed from others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pathsgd
from pathsgd import BalancedMuon, PathError
from support.unbalanced import TARGETS, build, distance, make, same, train, weights

# Averages of weights


def test_an_average_that_was_copied_before_computes_another_function():
    """The optimizer rewrites the weights in place. A copy made before is another, equivalent network, and a
    mean of two equivalent networks is equivalent to neither. A copy made after the optimizer is right."""
    model, x = build()
    early = copy.deepcopy(model)
    make(model)
    late = copy.deepcopy(model)
    expected = model(x)
    assert distance(early(x), expected) < 1e-14
    for average, is_right in ((early, False), (late, True)):
        with torch.no_grad():
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.5)
        assert (distance(average(x), expected) < 1e-14) == is_right
    assert distance(early(x), expected) > 0.1


@pytest.mark.parametrize("first", [True, False])
def test_torch_averages_are_right_whenever_they_are_made(first):
    """AveragedModel takes the weights as they are at its first update, which comes after the optimizer."""
    model, x = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if first else None
    optimizer = make(model, lr=1e-3)
    average = average or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(12):
        train(model, optimizer, x)
        average.update_parameters(model)
    assert distance(average(x), model(x)) < 5e-3


def test_an_average_that_is_swapped_in_for_evaluation_and_out_again_leaves_no_trace():
    """Versions tell that weights were written; their values tell that nothing has changed."""
    model, x = build(torch.float32)
    other = copy.deepcopy(model)
    optimizer, plain = make(model), make(other)
    average = copy.deepcopy(model)
    for _ in range(12):
        train(model, optimizer, x)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.state_dict())
        model(x)
        model.load_state_dict(kept)
    train(other, plain, x, 12)
    assert same(model, other)


# Parts of a model


def test_two_optimizers_of_one_model_leave_the_units_between_them_alone():
    """Each rescales the units whose weights are all its own. Making the second changes no weight of the
    first, and both train."""
    model, x = build()
    expected, graph = model(x).detach(), pathsgd.trace(model)
    between = [model[2].weight.detach().norm(dim=1), model[4].weight.detach().norm(dim=0)]
    first = BalancedMuon([*model[0].parameters(), *model[2].parameters()], graph)
    after_first = weights(model)
    second = BalancedMuon([*model[4].parameters(), *model[6].parameters()], graph)
    assert all(map(torch.equal, weights(model)[:4], after_first[:4]))
    assert not any(map(torch.equal, weights(model)[4:7], after_first[4:7]))
    assert distance(model(x), expected) < 1e-14
    # Of the units between, neither side was divided by a factor: biases, which lead from a fixed unit, tell.
    assert torch.equal(after_first[3], build()[0][2].bias)
    assert between[0].max() > 4 * between[0].min()
    losses = train(model, [first, second], x, 40)
    assert losses[-1] < 0.6 * losses[0]


def test_a_subset_of_the_parameters_is_trained_and_the_rest_stays_to_the_bit():
    model, x = build()
    expected, before = model(x).detach(), weights(model)
    optimizer = BalancedMuon(list(model.parameters())[:4], pathsgd.trace(model))
    assert distance(model(x), expected) < 1e-14
    assert not torch.equal(model[0].weight, before[0])
    losses = train(model, optimizer, x, 22)
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, list(model.parameters())[4:], before[4:]))


def test_frozen_parameters_stay_to_the_bit():
    """Also the units that lead into and out of them: what is left is balanced and trained."""
    model, x = build()
    model[2].requires_grad_(False)
    expected, before = model(x).detach(), weights(model)
    optimizer = make(model)
    assert distance(model(x), expected) < 1e-14
    assert not torch.equal(model[4].weight, before[4])
    losses = train(model, optimizer, x, 22)
    assert losses[-1] < losses[0]
    assert torch.equal(model[2].weight, before[2])
    assert torch.equal(model[2].bias, before[3])


def test_vectors_that_keep_matrices_from_being_balanced_are_named():
    """As the biases that torch's folding of batch norms adds, frozen; or those that another optimizer has."""
    model, _ = build()
    names = [name for name, p in model.named_parameters() if p.dim() == 1]
    for name in names[:-1]:
        model.get_parameter(name).requires_grad_(False)
    with pytest.warns(UserWarning, match=f"^{names[0]} and {len(names) - 2} more are frozen or not among"):
        make(model)
    model.requires_grad_()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    with pytest.warns(UserWarning, match="requires_grad_"):
        BalancedMuon(matrices, pathsgd.trace(model))
    make(model)
    model[0].requires_grad_(False)  # nothing leads into what is trained but these units
    make(model)


def test_a_layer_that_is_frozen_in_mid_training_stays_from_then_on():
    """Upkeep leaves it alone; when it is trained again, it is balanced again."""
    model, x = build()
    optimizer = make(model)
    train(model, optimizer, x, 5)
    model[2].requires_grad_(False)
    model.zero_grad()
    before = model[2].weight.detach().clone()
    train(model, optimizer, x, 12)
    assert torch.equal(model[2].weight, before)
    model[2].requires_grad_(True)
    losses = train(model, optimizer, x, 12)
    assert not torch.equal(model[2].weight, before)
    assert losses[-1] < losses[0]


def test_groups_have_their_own_rates_and_may_come_later():
    model, x = build()
    first, second = list(model.parameters())[:4], list(model.parameters())[4:]
    graph = pathsgd.trace(model)
    optimizer = BalancedMuon([{"params": first, "lr": 0.0}, {"params": second}], graph, lr=0.05)
    before = weights(model)
    train(model, optimizer, x, 3)
    assert all(map(torch.equal, first, before[:4]))
    assert not any(map(torch.equal, second, before[4:]))

    model, x = build()
    late = BalancedMuon(list(model.parameters())[:4], graph=pathsgd.trace(model))
    train(model, late, x, 3)
    expected = model(x).detach()
    late.add_param_group({"params": list(model.parameters())[4:], "lr": 0.02})
    assert distance(model(x), expected) < 1e-14
    before = weights(model)
    losses = train(model, late, x, 20)
    assert losses[-1] < losses[0]
    assert not any(map(torch.equal, model.parameters(), before))


def test_a_parameter_that_is_not_the_models_takes_relative_steps():
    """Adding it balances nothing again."""
    model, x = build()
    optimizer = make(model)
    train(model, optimizer, x, 3)
    before, extra = weights(model), nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra], "lr": 0.1})
    assert same(model, before)
    extra.grad = torch.tensor([1.0, -5.0], dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(extra.detach(), torch.tensor([2.7, 3.3], dtype=torch.float64))


# Weights that are computed


def test_masks_of_pruning_are_kept():
    """Pruned before: the mask is a part of the weight, and no step goes past it."""
    model, x = build()
    prune.random_unstructured(model[2], "weight", 0.5)
    expected, mask = model(x).detach(), model[2].weight_mask.clone()
    optimizer = BalancedMuon(model)
    assert distance(model(x), expected) < 1e-14
    losses = train(model, optimizer, x, 22)
    assert losses[-1] < losses[0]
    assert torch.equal(model[2].weight_mask, mask)
    assert bool((model[2].weight[mask == 0] == 0).all())


def replace(model):
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: prune.random_unstructured(m[2], "weight", 0.5),
        lambda m: parametrizations.weight_norm(m[2]),
        lambda m: setattr(m[4], "bias", None),
        lambda m: m.append(nn.ReLU()),
        replace,
    ],
    ids=["pruned", "weight norm", "removed", "added", "replaced"],
)
def test_another_structure_is_an_error_at_the_next_step(change):
    """Pruned, merged or replaced since the optimizer was made: it may rescale the wrong weights."""
    model, x = build()
    optimizer = make(model)
    train(model, optimizer, x, 2)
    change(model)
    with pytest.raises(PathError, match=r"other parameters or modules than when the optimizer was made"):
        train(model, optimizer, x)


def test_weights_that_are_tied_later_are_an_error_at_the_next_step():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    x = build()[1]
    optimizer = BalancedMuon(model)
    train(model, optimizer, x, 2)
    model[2].weight = model[0].weight
    with pytest.raises(PathError, match="weights tied"):
        train(model, optimizer, x)


def test_a_replaced_parameter_is_an_error_where_no_unit_is_rescaled_too():
    model, x = nn.Sequential(nn.Linear(6, 4)).double(), build()[1]
    optimizer = BalancedMuon(model)
    train(model, optimizer, x)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(PathError, match="replaced since"):
        train(model, optimizer, x)
    optimizer.zero_grad()
    model.zero_grad()
    with pytest.raises(PathError, match=r"'0.weight' is not the one the optimizer was made with"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_weights_are_left_as_they_are_and_trained(kind):
    """A weight that is computed from others cannot be rescaled: neither can the units around it. The rest is
    balanced."""
    model, x = build()
    getattr(parametrizations, kind)(model[2])
    model.eval()  # else spectral norm iterates in every forward pass
    expected = model(x).detach()
    originals = [p.detach().clone() for p in model[2].parametrizations.parameters()]
    outer = model[6].weight.detach().clone()
    optimizer = BalancedMuon(model, x[:1])
    assert distance(model(x), expected) < 1e-14
    assert all(map(torch.equal, model[2].parametrizations.parameters(), originals))
    assert not torch.equal(model[6].weight, outer)
    losses = train(model, optimizer, x, 22)
    assert losses[-1] < losses[0]


def test_low_rank_adapters_of_peft_are_balanced_trained_and_merged():
    """B starts at zero, so A has no balance of its own: its rows are brought to one norm. The adapted layer
    is frozen, and stays; merging gives the function that was trained."""
    import peft  # takes seconds

    model, x = build(torch.float32)
    config = peft.LoraConfig(target_modules=["0", "2"], r=3, modules_to_save=["6"])
    adapted = peft.get_peft_model(model, config)
    frozen = {n: p.detach().clone() for n, p in adapted.named_parameters() if not p.requires_grad}
    a = adapted.get_parameter("base_model.model.2.lora_A.default.weight")
    with torch.no_grad():
        a[1] *= 1000
    expected = adapted(x).detach()
    optimizer = BalancedMuon(adapted, x[:1])
    assert distance(adapted(x), expected) < 1e-6
    norms = a.detach().norm(dim=1)
    assert norms.max() < (1 + 1e-5) * norms.min()
    losses = train(adapted, optimizer, x, 22)
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(p, frozen[n]) for n, p in adapted.named_parameters() if n in frozen)
    trained = adapted(x).detach()
    assert distance(adapted.merge_and_unload()(x), trained) < 1e-5


# Kinds of models


def test_a_compiled_model_and_step_train_as_they_do_eagerly():
    model, x = build(torch.float32)
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    optimizer, plain = BalancedMuon(compiled), make(other)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(compiled(x), TARGETS).backward()
        step()
    train(other, plain, x, 12)
    assert same(model, other)


def test_a_model_of_16_bits_is_rescaled_by_powers_of_two_and_trains():
    """Its function stays to the bit, at the start and in upkeep."""
    model, x = build(torch.bfloat16)
    expected, before = model(x).detach(), weights(model)
    optimizer = make(model)
    assert torch.equal(model(x), expected)
    assert not same(model, before)
    factor = torch.tensor([2.0**k for k in range(-6, 6)], dtype=torch.bfloat16)
    losses = train(model, optimizer, x, 12)
    trained = model(x).detach()
    with torch.no_grad():
        model[0].weight.mul_(factor[:, None])
        model[0].bias.mul_(factor)
        model[2].weight.div_(factor)
    assert torch.equal(model(x), trained)
    losses += train(model, optimizer, x, 20)
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_a_model_without_units_to_rescale_is_trained_and_not_rewritten():
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double(), build()[1]
    before = weights(model)
    optimizer = BalancedMuon(model)
    assert same(model, before)
    losses = train(model, optimizer, x, 22)
    assert losses[-1] < 0.7 * losses[0]


def test_sparse_gradients_are_refused_and_nothing_is_written():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    tokens = torch.tensor([[0, 1, 2]])
    optimizer = BalancedMuon(model, tokens)
    before = weights(model)
    model(tokens).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert same(model, before)
