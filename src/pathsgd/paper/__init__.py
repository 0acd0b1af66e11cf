"""Experiments, figures and the command line: a client of the library, never imported by it."""
