"""Memory and traffic of a step of large models on many GPUs, from their shapes alone: docs/scale.md.

python -m benchmarks.scale             # the tables
python -m benchmarks.scale --count     # and counts the calls of a small Llama on many ranks
"""
