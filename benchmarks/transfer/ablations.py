"""What of BalancedMuon matters: each variant has one thing changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from .methods import constants_set

VARIANTS: dict[str, str] = {
    "SHARE 0.5": "set=pathsgd.muon.sizes.SHARE=0.5",
    # "no upkeep": "set=pathsgd.muon.MODULE.UPKEEP=0",
    # "two at once": "set=pathsgd.muon.MODULE.SMALL=1,set=pathsgd.muon.MODULE.BETAS=(0.9,0.95)",
    # "an option of the constructor": "betas=[0.9,0.95]",
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
