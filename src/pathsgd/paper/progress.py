"""How far a study is, on the terminal: a bar for each phase, a line for each choice."""

from __future__ import annotations

import sys
import threading
from typing import Any

from pathsgd.paper.config import Run
from pathsgd.paper.experiment.record import Line, Recorded
from pathsgd.paper.experiment.results import describe


class Progress:
    """A :class:`pathsgd.paper.experiment.conduct.Reporter`. Where there is no terminal, lines only."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._bar: Any = None
        self._lock = threading.Lock()

    def phase(self, title: str, epochs: int) -> None:
        self.close()
        if self.quiet:
            return
        length = f"{title}: {epochs} epoch{'s at most' if epochs > 1 else ''}"
        if not sys.stderr.isatty():
            self.say(length)
            return
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            self.say(length)
            return
        self._bar = tqdm(total=epochs, desc=title, unit="epoch", dynamic_ncols=True, leave=False)

    def epoch(self, run: Run, line: Line) -> None:
        if self._bar is None or not line["epoch"]:
            return
        with self._lock:
            self._bar.set_postfix_str(_short(run), refresh=False)
            self._bar.update()

    def ended(self, run: Recorded) -> None:
        """A run that ended early leaves epochs that nobody waits for."""
        if self._bar is None and not run.run.validation:
            self.say(f"{_short(run.run)}: {run.status}, test error {run.errors[-1]:.2%}")
        if self._bar is not None:
            with self._lock:
                self._bar.total -= run.run.epochs - run.epochs
                self._bar.refresh()

    def say(self, text: str) -> None:
        if self.quiet:
            return
        with self._lock:
            if self._bar is None:
                print(text, flush=True)
            else:
                self._bar.write(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _short(run: Run) -> str:
    return f"{describe(run)}, step size {run.step_size:g}, seed {run.seed.init}"
