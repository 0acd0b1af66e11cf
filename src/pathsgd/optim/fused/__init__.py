"""Stacks of linear layers moved in one pass that also sums the next step's gamma."""
