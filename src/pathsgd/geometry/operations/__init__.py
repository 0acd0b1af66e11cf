"""The effect of each operation of a path graph on path weights."""
