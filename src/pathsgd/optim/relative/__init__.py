"""Steps that are a fraction of what they move."""
