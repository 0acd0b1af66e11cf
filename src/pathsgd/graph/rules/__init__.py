"""One rule per operator: how it is written in the language of :mod:`pathsgd.graph.nodes`.

An operator without a rule ends the region, and the reason is kept.
"""

from __future__ import annotations

# Importing a module registers its rules.
from pathsgd.graph.rules import activations, normalisation, pooling, recurrent, views, weighted
from pathsgd.graph.rules.activations import why_it_ends
from pathsgd.graph.rules.registry import RULES, Call, Result

MOVES = frozenset(name for name, rule in RULES.items() if rule.__module__ == views.__name__)
COPIES = frozenset(
    ("clone", "contiguous", "detach", "alias", "to", "_to_copy", "<built-in function getitem>")
)

__all__ = [
    "COPIES", "MOVES", "RULES", "Call", "Result", "activations", "normalisation", "pooling", "recurrent", "views",
    "weighted", "why_it_ends",
]  # fmt: skip
