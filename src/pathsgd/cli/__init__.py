"""Commands of the program ``pathsgd``."""
