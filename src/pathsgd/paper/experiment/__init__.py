"""Runs, sweeps and studies: what is trained, how it is recorded, how it goes on after an interruption."""
