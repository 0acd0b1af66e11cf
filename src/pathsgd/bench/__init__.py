"""``pathsgd bench``: the time of a training step, beside torch's optimizers."""
