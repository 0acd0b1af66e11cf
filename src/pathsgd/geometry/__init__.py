"""Numbers on the structure: scales, norms, rescalings."""
