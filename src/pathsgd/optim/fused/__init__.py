"""The Path-SGD step of a chain of linear layers: readable, in blocks, compiled, and on a GPU."""
