"""The event loop that a run's episodes share.

    run(main())      as asyncio.run, for a loop with hundreds of episodes in flight

A turn of an episode needs several timers, tasks and wake-ups, which uvloop has for half of what they cost on
asyncio's own loop. The garbage collector looks less often: with hundreds of episodes alive it would look
through the youngest objects many times a second, and find next to nothing.
Invariant: the collector is as it was when `run` is over. Waits: the caller, for `main`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
_ALLOCATIONS = 20_000  # between two looks at what is young


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`, or what it raised."""
    with _rare_collections(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
