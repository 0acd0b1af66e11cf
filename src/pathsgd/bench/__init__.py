"""What a step costs, beside torch's optimizers: ``pathsgd bench``."""
