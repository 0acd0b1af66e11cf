"""Does one learning rate train every network? ``python -m benchmarks.transfer --help``.

networks -> tasks -> methods -> train (one job) -> run (many jobs on one GPU) -> records -> table, figure;
plan writes the jobs, pack the images.
"""
