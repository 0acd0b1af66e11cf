"""``pathsgd inspect``: the path graph, path norm and imbalance of a user's own model."""
