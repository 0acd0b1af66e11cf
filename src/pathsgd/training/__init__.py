"""Mechanisms that optimizers share: lazy tracing, staleness, CUDA-graph capture."""
