"""Calls of what an author wrote, plain or async, that can be given up on.

    calls = Calls("GuessEnv")
    async with asyncio.timeout(limit_s):
        await calls.call(env.begin, task)     its result, or what it raised
    await calls.when_returned(env.end)        at once, or after the last call that was given up on

When the caller is cancelled or out of time, a coroutine is cancelled, and a thread, which nobody can stop,
is left to itself. Either has `grace_s` to end. Then it is abandoned: the caller goes on, what it returns or
raises later is discarded, and it is counted and named in the log.

Invariants: a cancelled call is over within `grace_s`, and what it started has then ended or is one of the
strays; what undoes a call never runs beside a stray. A stray that never returns is never undone.
Not bounded: an async function that blocks the event loop itself (time.sleep), for nothing on that loop runs
then; and a coroutine that swallows every cancellation, which `asyncio.run` awaits when it closes its loop.
Waits: a call for its function; `when_returned` for nobody.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from .hooks import contained, name_of, to_the_end
from .threads import Threads

T = TypeVar("T")
GRACE_S = 2.0
END_S = 30.0
UNWIND_S = END_S + 2 * GRACE_S
"""An environment that is cancelled may need a grace for its hook, and then a whole `end` with its grace."""
log = logging.getLogger(__name__)


class Abandoned:
    """How many calls were given up on, by hook; the log names each hook once."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, hook: str, grace_s: float) -> None:
        """One more. Called on the event loop."""
        self.counts[hook] += 1
        if self.counts[hook] == 1:
            log.warning(
                "%s still ran %g s after its deadline or its cancellation and was abandoned; its result is "
                "discarded. Write it async, or bound what it waits for. Said once for each hook.",
                hook,
                grace_s,
            )

    def __str__(self) -> str:
        return ", ".join(f"{hook} {count}" for hook, count in sorted(self.counts.items())) or "none"


class Calls:
    """Calls the functions of one environment, and knows which of those it gave up on still run.

    owner      the environment's name, for the log
    grace_s    what a call has to end in once its caller no longer waits; None: GRACE_S
    abandoned  where to count; a run shares one
    threads    what plain functions run in; a run shares them
    """

    def __init__(
        self,
        owner: str,
        *,
        grace_s: float | None = None,
        abandoned: Abandoned | None = None,
        threads: Threads | None = None,
    ) -> None:
        self._owner, self._grace_s = owner, GRACE_S if grace_s is None else grace_s
        self.abandoned = Abandoned() if abandoned is None else abandoned
        self.threads = Threads() if threads is None else threads
        # Futures of threads, not of a loop: an environment with a synchronous half is used from two loops.
        self._strays: dict[Future[None], asyncio.Future[Any]] = {}
        self._postponed: set[asyncio.Task[None]] = set()

    @property
    def strays(self) -> tuple[Future[None], ...]:
        """One future for each abandoned call that still runs; done when it returned."""
        return tuple(self._strays)

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of a plain or async function; a plain one runs in a thread."""
        if inspect.iscoroutinefunction(function):
            return await self._run(function, function(*args, **kwargs))
        result = await self.in_thread(function, *args, **kwargs)
        return await self._run(function, result) if inspect.isawaitable(result) else result

    async def in_thread(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """The result of a plain function."""
        thread = self.threads.started(function, *args, **kwargs)
        return await self._watched(function, asyncio.wrap_future(thread), thread)

    async def when_returned(self, undo: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `undo` to its end; where a stray runs, do not wait but run it after the last one returned."""
        if not self._strays:
            await to_the_end(undo())
            return
        later = asyncio.create_task(self._afterwards(undo))
        self._postponed.add(later)
        later.add_done_callback(self._postponed.discard)

    async def settled(self, within_s: float) -> bool:
        """Whether no stray runs and nothing is left to undo; waits for that at most so long."""
        if not self._strays and not self._postponed:
            return True
        try:
            async with asyncio.timeout(within_s):
                await self._strays_returned()
                if self._postponed:
                    await asyncio.wait(tuple(self._postponed))
        except TimeoutError:
            return False
        return True

    async def _run(self, function: Callable[..., Any], awaitable: Awaitable[T]) -> T:
        # A task of its own: a coroutine that swallows its cancellation would hold its caller for ever.
        running = asyncio.get_running_loop().create_task(contained(awaitable))
        return await self._watched(function, running, None)

    async def _watched(
        self, function: Callable[..., Any], running: asyncio.Future[T], thread: Future[T] | None
    ) -> T:
        # As asyncio.shield, in fewer turns of the loop: cancelling the caller does not cancel `running`.
        over = asyncio.get_running_loop().create_future()
        running.add_done_callback(functools.partial(_tell, over))
        try:
            await over
        except asyncio.CancelledError:
            if thread is None:
                running.cancel()
            try:
                await asyncio.wait({running}, timeout=self._grace_s)
            finally:
                if running.done():
                    _look_at(running)
                else:
                    self._abandon(name_of(function), running, thread)
            raise
        return running.result()

    def _abandon(self, name: str, running: asyncio.Future[Any], thread: Future[Any] | None) -> None:
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()
        self._strays[ended] = running

        def returned(_: object) -> None:
            del self._strays[ended]
            ended.set_result(None)

        if thread is None:
            running.add_done_callback(_look_at)
            running.add_done_callback(returned)
        else:
            running.cancel()  # the thread may outlive its loop, which must not hear of it then
            thread.add_done_callback(returned)
        self.abandoned.note(f"{self._owner}.{name}", self._grace_s)

    async def _afterwards(self, undo: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._strays_returned()
        await to_the_end(undo())

    async def _strays_returned(self) -> None:
        while self._strays:
            waiting = [asyncio.wrap_future(stray) for stray in self.strays]
            try:
                await asyncio.wait(waiting)
            finally:
                for one in waiting:
                    one.cancel()


def _tell(over: asyncio.Future[None], _: object) -> None:
    if not over.done():
        over.set_result(None)


def _look_at(running: asyncio.Future[Any]) -> None:
    """So that asyncio does not report what it raised as lost."""
    if not running.cancelled():
        running.exception()
