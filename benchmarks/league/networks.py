"""All networks and tasks of the league by name, and its sets."""

from __future__ import annotations

import functools
from pathlib import Path

from .network import Network
from .seen import SEEN
from .seen_tasks import SEEN_TASKS
from .tasks import TASKS, Load, Task
from .tuned_on import ALSO_TUNED_ON, TUNED_ON
from .unseen import UNSEEN
from .unseen_tasks import UNSEEN_TASKS

SETS = {
    "tuned-on": tuple(TUNED_ON), "also-tuned-on": tuple(ALSO_TUNED_ON), "seen": tuple(SEEN),
    "unseen": tuple(UNSEEN),
}  # fmt: skip
NETWORKS: dict[str, Network] = {**TUNED_ON, **ALSO_TUNED_ON, **SEEN, **UNSEEN}
ALL_TASKS: dict[str, Load] = {**TASKS, **SEEN_TASKS, **UNSEEN_TASKS}


@functools.cache
def load_task(name: str, folder: Path, device: str) -> Task:
    """Once in a process."""
    return ALL_TASKS[name](folder, device)
