"""Deadlines that stand still while whom they bind waits for a sandbox that others hold.

    async with deadline(60) as clock:       like asyncio.timeout(60)
        with waiting():                     every deadline around it stands still, of callers too
            slot = await ...

So an episode is never called slow because other episodes hold the sandboxes: the clock runs for its own work.
Invariant: outside of `waiting` a deadline passes as asyncio.timeout does. One that binds two tasks stands
still while either waits. A wait on another event loop than the deadline's stops no clock.
Waits: nobody here; whoever waits inside `waiting` bounds that wait himself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

# A call reaches the pool through code of an environment's author, who passes no clock on.
_around: ContextVar[tuple[deadline, ...]] = ContextVar("deadlines around this call", default=())


class deadline:
    """TimeoutError once `seconds` have passed that were not spent waiting: `waited_s`, so far."""

    def __init__(self, seconds: float) -> None:
        self._timeout, self._loop = asyncio.timeout(seconds), asyncio.get_running_loop()
        self._waiters = 0
        self._left_s = self._since = self.waited_s = 0.0
        self._bound = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._bound = True
        self._outside: Token[tuple[deadline, ...]] = _around.set((*_around.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bound = False
        _around.reset(self._outside)
        await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        """Whether it has passed."""
        return self._timeout.expired()

    @property
    def is_of_this_loop(self) -> bool:
        """Whether it can be stopped here."""
        return self._loop is asyncio.get_running_loop()

    @property
    def _runs(self) -> bool:
        return self._bound and not self.expired()

    def stop(self) -> None:
        """One more waits."""
        self._waiters += 1
        when = self._timeout.when()
        if self._runs and when is not None:
            self._since = self._loop.time()
            self._left_s = when - self._since
            self._timeout.reschedule(None)

    def go_on(self) -> None:
        """One less waits."""
        self._waiters -= 1
        if self._runs and not self._waiters:
            now = self._loop.time()
            self.waited_s += now - self._since
            self._timeout.reschedule(now + self._left_s)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """What is awaited in this block is not the waiter's own doing."""
    around = [clock for clock in _around.get() if clock.is_of_this_loop]
    for clock in around:
        clock.stop()
    try:
        yield
    finally:
        for clock in around:
            clock.go_on()
