"""What is to be done later, by the loop that everything else here runs in."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable


class Timers:
    """Nothing is done but in `fire`."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0  # tells apart what is due at the same time

    def add(self, seconds: float, then: Callable[[], None]) -> None:
        """Do it that much later."""
        self._count += 1
        heapq.heappush(self._due, (time.monotonic() + seconds, self._count, then))

    def fire(self) -> float:
        """Do what is due; seconds until the next, infinity when there is none."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else float("inf")
