"""The optimizers of the paper: Path-SGD, and any torch optimizer on z = w sqrt(gamma)."""
