"""Where balance pays, on trained networks: each module is a command, ``python -m benchmarks.uses.NAME``."""
