"""A bug in what an author wrote, told in a few lines: where it is, in which episode, and what to do.

    with blamed("GuessEnv", "reward found", task.id, function):
        ...                       whatever it raises becomes an EnvironmentBug, chained to its traceback

Invariant: our own errors pass unchanged, so a failure of the infrastructure goes on masking.
Nothing here waits.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ..errors import EnvironmentBug, RzError

_PACKAGE = __name__.partition(".")[0]
_LIBRARY = sysconfig.get_paths()["stdlib"]


@contextmanager
def blamed(
    environment: str, hook: str, task_id: str = "", function: Callable[..., Any] | None = None
) -> Iterator[None]:
    """What the block raises is a bug of that hook; `function` is named where no frame of the author's is."""
    try:
        yield
    except RzError:
        raise
    except Exception as error:
        where = users_place(error) or source_of(function) or _innermost(error)
        raise EnvironmentBug(told(environment, hook, task_id, brief(error), where)) from error


def told(environment: str, hook: str, task_id: str, what: str, where: str) -> str:
    """The message of a bug.

    >>> print(told("GuessEnv", "reward found", "t1", "KeyError: 'n'", "guess.py:7"))
    environment GuessEnv, reward found, task t1: KeyError: 'n'
      at guess.py:7
      Fix it and resume the run.
    """
    task = f", task {task_id}" if task_id else ""
    return f"environment {environment}, {hook}{task}: {what}\n  at {where}\n  Fix it and resume the run."


def brief(error: BaseException) -> str:
    """Type and text of an error."""
    return f"{type(error).__name__}: {error}"


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
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
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
