"""Calling what an author wrote, plain or async, without ever blocking the event loop.

    call(function, ...)     async functions on the loop, plain ones in a thread of their own
    to_the_end(coroutine)   runs to its end even where the caller is cancelled
    Portal                  an event loop in a thread, for callers that are not async

Invariant: when a cancelled call returns, what it started has ended. A thread cannot be stopped, so a
cancelled plain function is waited for: write async whatever may hang. A thread each, not a pool: hundreds of
episodes whose plain tools sleep must not queue behind one another.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a plain or async function."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run a plain function in a new thread; a cancelled caller waits until it returned."""
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            done.set_result(context.run(function, *args, **kwargs))
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            done.set_exception(_carried(error))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, name=f"rz-{function.__name__}", daemon=True).start()
    return await _shielded(asyncio.wrap_future(done))


def _carried(error: BaseException) -> RuntimeError:
    """What no future can carry (StopIteration), or what would end the event loop with every other episode."""
    carried = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    carried.__cause__ = error
    return carried


async def to_the_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await something that must not be left half done: cancellation is raised after it ended."""
    return await _shielded(asyncio.ensure_future(coroutine))


async def _shielded(running: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # looked at, so that asyncio does not report it as lost
        raise


class Portal:
    """An event loop in a daemon thread. One portal always runs on one loop, so what belongs to a loop
    (processes, sockets) may be used by one `run` and closed by a later one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rz-portal", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it; an interrupt of the waiting thread cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
