"""Uses of paths and of balanced networks beside training: pruning, quantisation, a look at a network."""
