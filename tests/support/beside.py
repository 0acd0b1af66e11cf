"""Work that another thread does meanwhile."""

from __future__ import annotations

import threading


class Beside(threading.Thread):
    """Does some work again and again until it is told to stop."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self.work, self.stopped, self.rounds = work, threading.Event(), 0

    def run(self):
        while not self.stopped.is_set():
            self.work()
            self.rounds += 1

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.stopped.set()
        self.join()
