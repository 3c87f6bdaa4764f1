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
        self._left_s, self._loop = seconds, asyncio.get_running_loop()
        self._waiters = 0
        self._since = self.waited_s = 0.0
        self._bound = self._expired = False

    # As asyncio.timeout does it, without its layers: every turn of every episode enters several.
    async def __aenter__(self) -> Self:
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("a deadline binds a task: await it inside of one")
        self._task, self._cancelling = task, task.cancelling()
        self._run()
        self._bound = True
        self._outside: Token[tuple[deadline, ...]] = _around.set((*_around.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bound = False
        self._timer.cancel()
        _around.reset(self._outside)
        # A cancellation that came from elsewhere too is that one's.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expired(self) -> bool:
        """Whether it has passed."""
        return self._expired

    @property
    def is_of_this_loop(self) -> bool:
        """Whether it can be stopped here."""
        return self._loop is asyncio.get_running_loop()

    @property
    def _runs(self) -> bool:
        return self._bound and not self._expired

    def _run(self) -> None:
        self._since = self._loop.time()
        self._timer = self._loop.call_later(self._left_s, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()

    def stop(self) -> None:
        """One more waits."""
        self._waiters += 1
        if self._runs and self._waiters == 1:
            now = self._loop.time()
            self._left_s -= now - self._since
            self._since = now
            self._timer.cancel()

    def go_on(self) -> None:
        """One less waits."""
        self._waiters -= 1
        if self._runs and not self._waiters:
            self.waited_s += self._loop.time() - self._since
            self._run()


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
