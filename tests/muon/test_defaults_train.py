"""No lr given: within 10% of AdamW's best of five rates on four small tasks."""

from __future__ import annotations

import pytest

from pathsgd import BalancedMuon
from support.small_tasks import train

SEEDS = (0, 1)

# Validation losses of torch.optim.AdamW with its other defaults, 150 steps, mean of seeds 0 and 1, at the
# best of 1e-3, 3.16e-3, 1e-2, 3.16e-2 and 1e-1. That is 3.16e-2 each time; in their order the others gave
# mlp 0.504 0.152 0.093 - 0.212, cnn 0.850 0.164 0.064 - 0.079, batch-norm 0.384 0.117 0.057 - 0.061,
# gpt 2.468 1.910 1.442 - 1.288.
ADAMW = {"mlp": 0.0892, "cnn": 0.0564, "batch-norm": 0.0496, "gpt": 1.0796}


@pytest.mark.parametrize("name", ADAMW)
def test_without_a_rate(name):
    assert sum(train(name, BalancedMuon, seed) for seed in SEEDS) / len(SEEDS) <= 1.1 * ADAMW[name]
