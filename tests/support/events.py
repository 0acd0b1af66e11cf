"""What may happen to an optimizer between two steps: each is done once, before step ``AT``."""

from __future__ import annotations

import torch

AT = 5


def nothing(optimizer):
    pass


def load(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def decay(optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.1


def move_state(optimizer):
    for state in optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items()})


def write_state(optimizer):
    for state in optimizer.state.values():
        for key in set(state) - {"step", "growth"}:
            state[key].zero_()


def freeze(optimizer):
    optimizer.param_groups[0]["params"][0].requires_grad_(False)


def write_weights(optimizer):
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(2)


def replace_weights(optimizer):
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.data = parameter.data.clone()


CAPTURES = {
    nothing: 1, load: 2, decay: 2, move_state: 2, write_state: 1, freeze: 2, write_weights: 1,
    replace_weights: 2,
}  # fmt: skip
"""How often a step is captured if this happens: again where what it read is somewhere else."""
