"""One rule per operator: how it is written in the language of :mod:`pathsgd.graph.nodes`.

An operator without a rule ends the region, and the reason is kept.
"""

from __future__ import annotations

# Importing a module registers its rules.
from pathsgd.graph.rules import (  # noqa: F401
    activations,
    data_movement,
    matrix_products,
    normalisation,
    pooling,
    recurrent,
    selection,
    weighted,
)
from pathsgd.graph.rules.activations import why_it_ends as why_it_ends
from pathsgd.graph.rules.registry import RULES as RULES
from pathsgd.graph.rules.registry import Call as Call
from pathsgd.graph.rules.registry import OperatorRule as OperatorRule
