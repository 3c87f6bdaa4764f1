"""Threads for plain functions, used again: starting one costs more than most hooks do.

    threads = Threads()
    threads.started(function, ...) -> Future        it cannot be cancelled

Invariant: no call waits for another. A free thread takes it, and where there is none a new one does, however
many there are; so a function that never returns keeps the thread that it runs in, and nothing else.
Waits: nobody. A thread that has been free for a while ends; all are daemons, which hold up no exit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .hooks import prepared

T = TypeVar("T")
FREE_S = 2.0


class Threads:
    """As many threads as there are calls at once. `started` may be called from any thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # One entry for each free thread that no call is on its way to. Whoever takes one may rely on it.
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()

    def started(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a plain function in a thread that nothing else runs in."""
        done, work = prepared(function, *args, **kwargs)
        self._work.put(work)
        if not self._took_free():
            threading.Thread(target=self._serve, name="rz-hook", daemon=True).start()
        return done

    def _serve(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=FREE_S)
            except queue.Empty:
                if self._took_free():
                    return
                continue  # a call counts on this thread, and is about to be put
            work()
            del work  # what the call held must not live until the next one
            self._free.put(None)

    def _took_free(self) -> bool:
        try:
            self._free.get_nowait()
        except queue.Empty:
            return False
        return True
