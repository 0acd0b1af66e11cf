"""How many of the weights of a hundred networks have a rescaling symmetry, and is it kept exactly?

    python -m benchmarks.coverage                          # about three minutes on one core
    python -m benchmarks.coverage --models Llama ViT       # some of them
    python -m benchmarks.coverage --json rows.json --write # keeps the numbers, writes results/coverage

models (hugging_face, plain) -> measure (causes) -> page.
"""
