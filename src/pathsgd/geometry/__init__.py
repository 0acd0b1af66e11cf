"""Numbers on the structure: gamma, norms, rescalings."""
