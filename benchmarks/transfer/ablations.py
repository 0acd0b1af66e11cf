"""What of BalancedMuon matters: each variant has one thing changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from .methods import constants_set

VARIANTS: dict[str, str] = {
    "no growth": "growth=0.0",
    "no upkeep": "set=pathsgd.muon.round.MOST=1.0",
    "no depth rule in a region": "set=pathsgd.optim.relative.depth.SHALLOW=1e9",
    "no depth rule across norms": "set=pathsgd.optim.relative.depth.SHALLOW_NETWORK=1e9",
    "no catching up": "set=pathsgd.optim.relative.sizes.SMALL=1e-9",
    "SHARE 0.01": "set=pathsgd.optim.relative.sizes.SHARE=0.01",
    "no noise bound": "set=pathsgd.muon.balanced_muon.NOISE=0.0",
    "rows of one matrix together": "set=pathsgd.optim.relative.blocks.MOST=0",
}
"""Name in the table: options of the method, see methods.py. Constants are named where they are defined; those
that are read as a module is imported, as in the default of an argument, keep their value."""

METHOD = "balanced-muon"


def variants() -> Iterator[str]:
    """The methods, the unchanged one first; those whose constants are not there are left out."""
    yield METHOD
    for name, options in VARIANTS.items():
        try:
            with constants_set(f"{METHOD}:{options}"):
                pass
        except (AttributeError, ImportError) as missing:
            print(f"left out: {name} ({missing})", file=sys.stderr)
        else:
            yield f"{METHOD}:{options}"


def name_of(method: str) -> str | None:
    """The name of a variant."""
    return next((name for name, options in VARIANTS.items() if method == f"{METHOD}:{options}"), None)
