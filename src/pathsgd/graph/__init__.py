"""Structure: what is a unit, an edge, a region. No arithmetic on weights."""
