"""A user's own model as the library sees it: ``pathsgd inspect``."""
