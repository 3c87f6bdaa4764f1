"""Making something at the other end of a network, so that nothing is left when the caller is cancelled.

Cancelling a request does not take it back: the other end may have it already. So what was begun is let
finish, then undone, and only then is the caller cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Made = TypeVar("Made")


class Undoing:
    """Makes things; `finish` waits for what is still being undone."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def make(
        self, making: Coroutine[Any, Any, Made], undo: Callable[[Made], Awaitable[object]]
    ) -> Made:
        """What `making` makes. A cancelled caller waits for it and for its undoing; so bound both."""
        task = asyncio.create_task(making)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            undoing = asyncio.create_task(self._undo(task, undo))
            self._tasks.add(undoing)
            undoing.add_done_callback(self._tasks.discard)
            await asyncio.shield(undoing)
            raise

    async def _undo(self, task: asyncio.Task[Made], undo: Callable[[Made], Awaitable[object]]) -> None:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await undo(task.result())

    async def finish(self) -> None:
        """All that was cancelled is undone."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
