"""Relative steps by Triton kernels, each of which goes over all blocks in one launch."""
