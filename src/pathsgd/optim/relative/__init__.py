"""Steps that are a fraction of what they move: every matrix turns by an angle of ``lr``."""
