"""The data sets of the paper's experiments, read from their original files: ``pathsgd data``."""
