"""A bug in what an author wrote, told in a few lines: where it is, in which episode, and what to do.

    with blamed("GuessEnv", "reward found", task.id, function):
        ...                       whatever it raises becomes an EnvironmentBug, chained to its traceback

Invariants: our own errors pass unchanged, so a failure of the infrastructure goes on masking; so does
somebody else's wish to stop (a cancelled task, a signal). What only looks like one, raised by the author's
own code, is a bug: taken for a cancellation it would leave its episode unfinished and unreported.
Nothing here waits.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

from ..errors import EnvironmentBug, RzError

_PACKAGE = __name__.partition(".")[0]
_LIBRARY = sysconfig.get_paths()["stdlib"]


class Carried(RuntimeError):
    """Stands for its cause, which no future can carry or which would be taken for another's wish to stop."""


class blamed:
    """What the block raises is a bug of that hook; `function` is named where no frame of the author's is.

    passing  what the hook may raise, besides our own errors
    A class and no generator: every step of every episode enters several.
    """

    __slots__ = ("_environment", "_function", "_hook", "_passing", "_task", "_task_id")

    def __init__(
        self,
        environment: str,
        hook: str,
        task_id: str = "",
        function: Callable[..., Any] | None = None,
        *,
        passing: tuple[type[Exception], ...] = (),
    ) -> None:
        self._environment, self._hook, self._task_id = environment, hook, task_id
        self._function, self._passing = function, passing

    def __enter__(self) -> None:
        self._task = _current_task()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (RzError, *self._passing)) or from_outside(error, self._task):
            return
        where = users_place(error) or source_of(self._function) or _innermost(error)
        raise EnvironmentBug(
            told(self._environment, self._hook, self._task_id, brief(error), where)
        ) from error


def from_outside(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether the error is somebody's wish to stop, not of the code that it came through.

    task  the one that code ran in; None outside of an event loop
    """
    if isinstance(error, Exception):
        return False
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    if isinstance(error, GeneratorExit):  # a coroutine is closed from elsewhere, never by its own task
        return task is None or _current_task() is not task
    return _by_a_signal(error)


def told(
    environment: str,
    hook: str,
    task_id: str,
    what: str,
    where: str,
    *,
    episode_id: str = "",
    remedy: str = "Fix it and resume the run.",
) -> str:
    """The message of a bug.

    >>> print(told("GuessEnv", "reward found", "t1", "KeyError: 'n'", "guess.py:7"))
    environment GuessEnv, reward found, task t1: KeyError: 'n'
      at guess.py:7
      Fix it and resume the run.
    """
    episode = f", episode {episode_id}" if episode_id else ""
    task = f", task {task_id}" if task_id else ""
    return f"environment {environment}, {hook}{episode}{task}: {what}\n  at {where}\n  {remedy}"


def brief(error: BaseException) -> str:
    """Type and text of an error."""
    if isinstance(error, Carried) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def located(error: BaseException) -> str:
    """The error, and the line of the author's that raised it."""
    place = users_place(error)
    return f"{brief(error)}, at {place}" if place else brief(error)


def users_place(error: BaseException) -> str:
    """`file:line` of the innermost frame outside of rz_agent, Python and packages; "" without one."""
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return f"{error.filename}:{error.lineno}"
    found = ""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        if _is_users(step):
            found = f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return found


def source_of(function: Callable[..., Any] | None) -> str:
    """`file:line` of a function's definition; "" where it has none."""
    code = _code_of(function) if function is not None else None
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _is_users(step: TracebackType) -> bool:
    # By the module's name, not its file: an author may keep the environment beside the package's own files.
    file, module = step.tb_frame.f_code.co_filename, str(step.tb_frame.f_globals.get("__name__", ""))
    installed = "site-packages" in file or "dist-packages" in file
    ours = module.partition(".")[0] == _PACKAGE
    return not (installed or ours or file.startswith(("<", _LIBRARY)))


def _innermost(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _by_a_signal(error: BaseException) -> bool:
    """Whether a signal's handler raised it in the midst of other code: the error then has its frame."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    if (
        isinstance(error, KeyboardInterrupt)
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    ):
        return True  # Python's own handler leaves no frame; a Ctrl-C is the likelier story
    codes = {code for handler in handlers if (code := _code_of(handler)) is not None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
