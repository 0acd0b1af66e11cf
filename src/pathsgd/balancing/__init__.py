"""Balance: the equivalent network of least mu_{p,q}, and rescaling of units."""
