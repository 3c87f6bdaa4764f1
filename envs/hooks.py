"""Running what an author wrote without blocking the event loop, and without letting it end that loop.

    prepared(function, ...)   a plain function as a future, and what a thread must do to resolve it
    contained(awaitable)      its result, or an ordinary exception
    in_thread(function, ...)  a plain function of ours, waited for to its end
    to_the_end(coroutine)     runs to its end even where the caller is cancelled
    Portal                    an event loop in a thread, for callers that are not async

Invariant: `prepared` and `contained` come to a result, an Exception, or somebody else's wish to stop. An
exit, a KeyboardInterrupt or a CancelledError that the author's code raised by itself would otherwise end the
loop with every other episode, or look like a cancellation that nobody asked for.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from .bug import Carried, brief, from_outside

T = TypeVar("T")
_CLOSE_S = 2.0


def prepared(
    function: Callable[..., T], /, *args: Any, **kwargs: Any
) -> tuple[Future[T], Callable[[], None]]:
    """A plain function's result, which cannot be cancelled, and the work that some thread must do for it, in
    the context of the caller."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            done.set_result(context.run(function, *args, **kwargs))
        except (StopIteration, CancelledError) as error:
            done.set_exception(_carried(error))
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:
            done.set_exception(_carried(error))

    return done, work


async def contained(awaitable: Awaitable[T]) -> T:
    """Await what an author wrote; to be run as a task of its own."""
    task = asyncio.current_task()
    try:
        return await awaitable
    except Exception:
        raise
    except BaseException as error:
        if from_outside(error, task):
            raise
        raise _carried(error) from error


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function, also one inside of functools.partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _carried(error: BaseException) -> Carried:
    carried = Carried(brief(error)).with_traceback(error.__traceback__)
    carried.__cause__ = error
    return carried


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run a plain function that ends by itself; a cancelled caller waits until it returned."""
    done, work = prepared(function, *args, **kwargs)
    threading.Thread(target=work, name=f"rz-{name_of(function)}", daemon=True).start()
    return await _shielded(asyncio.wrap_future(done))


async def to_the_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await something that must not be left half done: cancellation is raised after it ended."""
    return await _shielded(asyncio.ensure_future(contained(coroutine)))


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
        """Cancel what still runs, give it a moment, and end the loop."""
        self.run(_cancel_the_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=_CLOSE_S)
