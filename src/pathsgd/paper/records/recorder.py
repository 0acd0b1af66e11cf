"""What a run tells while it is trained, and the recorder that writes it into the run's folder.

Where the run is trained does not matter: its events come from the same process, or from another machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pathsgd.paper.config import Run
from pathsgd.paper.records.run_folder import Metrics, RunFolder, RunRecord, Status

OnEpoch = Callable[[Run, Metrics], None]


@dataclass(frozen=True)
class Begun:
    """The run begins, or goes on, after these lines."""

    lines: list[Metrics]


@dataclass(frozen=True)
class Epoch:
    """An epoch was trained."""

    line: Metrics
    checkpoint: bytes | None
    """From which the run goes on after it, where it was time for one."""


@dataclass(frozen=True)
class Ended:
    """The run is at its end."""

    status: Status
    reason: str
    seconds: float


Event = Begun | Epoch | Ended


class Recorder:
    """Writes a run's events into its folder, and tells every epoch once.

    Args:
        folder: The folder of the run.
        on_epoch: Called after every epoch.
        keep_checkpoint: Whether the last checkpoint stays when the run has ended.
        whole: Record epochs only together with a checkpoint after them, so that none is trained again.
    """

    def __init__(
        self, folder: RunFolder, on_epoch: OnEpoch, keep_checkpoint: bool, whole: bool = False
    ) -> None:
        self.folder, self.on_epoch = folder, on_epoch
        self.keep_checkpoint, self.whole = keep_checkpoint, whole
        self._told = 0
        self._held: list[Metrics] = []

    def record(self, event: Event) -> None:
        if isinstance(event, Begun):
            self._held = []
            self.folder.begin(event.lines)
            self._tell(event.lines)
        elif isinstance(event, Epoch):
            self._held.append(event.line)
            if event.checkpoint is not None or not self.whole:
                self._write_held()
            self._tell([event.line])
            if event.checkpoint is not None:
                self.folder.save(event.checkpoint)
        else:
            self._write_held()
            self.folder.end(event.status, event.reason, event.seconds, self.keep_checkpoint)

    def find_record(self) -> RunRecord:
        """Of the run, which has ended."""
        found = self.folder.find_record()
        assert found is not None
        return found

    def _write_held(self) -> None:
        self.folder.add_lines(self._held)
        self._held = []

    def _tell(self, lines: list[Metrics]) -> None:
        for line in lines[max(0, self._told - lines[0]["epoch"]) :]:
            self.on_epoch(self.folder.run, line)
            self._told = line["epoch"] + 1
