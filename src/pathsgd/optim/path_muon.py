"""Muon in the geometry of paths."""

from __future__ import annotations

from typing import Any

from pathsgd.optim.path_normalized import PathNormalized
from pathsgd.optim.relative.muon import RelativeMuon


class PathMuon(PathNormalized):
    """Muon."""

    def __init__(self, model: Any, example_input: Any = None, lr: float = 0.04, **options: Any) -> None:
        super().__init__(
            RelativeMuon, model, example_input, lr=lr, relative=True, blocks_of=self.blocks_of, **options
        )
