"""The optimizer on the weights of a balanced network."""
