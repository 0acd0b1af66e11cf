"""One rule per operator: how it is written in the language of :mod:`pathsgd.graph.nodes`.

An operator without a rule ends the region, and the reason is kept.
"""

from __future__ import annotations

from pathsgd.graph.rules import activations, edges, norms, sequences, shapes, windows
from pathsgd.graph.rules.registry import RULES, Call, Result

__all__ = [
    "RULES",
    "Call",
    "Result",
    "activations",
    "edges",
    "norms",
    "sequences",
    "shapes",
    "windows",
]
