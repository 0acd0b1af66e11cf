"""Updates: Path-SGD, and any torch optimizer made rescaling invariant."""
