"""What an executor does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from pathsgd.paper.config import Run
from pathsgd.paper.progress import Progress
from pathsgd.paper.records.run_folder import RunRecord
from pathsgd.paper.training.run_loop import Checkpoints


class Executor(Protocol):
    """Trains runs. Which one does it changes none of their numbers."""

    @property
    def device(self) -> torch.device:
        """What runs are trained on, wherever that is."""

    def train(
        self, runs: Sequence[Run], out: Path, checkpoints: Checkpoints, progress: Progress
    ) -> dict[Run, RunRecord]:
        """Trains these runs from what is recorded of them in ``out/runs`` to their end, and records them.

        Where they were trained is noted in ``out/manifest.json``.
        """

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function where runs are trained, with the device to itself."""
