"""A stateful interpreter: reads cells from one descriptor, marks each one's end on another.

Runs as the untrusted program itself: a cell can do anything to this process, and only to this one.
A request is a 4-byte length, a 4-byte cell number and the source; a mark is `<cell number> <exit code>`
on a line. A mark with another number is not the one the agent waits for, so a forged or late one
cannot shift later cells.
"""

from __future__ import annotations

import ast
import builtins
import io
import linecache
import os
import signal
import struct
import sys
import traceback
import types
from typing import NoReturn

INTERRUPTED = 130


def _text_stream(fd: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _read(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(fd, count - len(data))
        if not more:
            os._exit(0)
        data += more
    return data


def _run(source: str, name: str, names: dict[str, object]) -> int:
    """Run one cell as a prompt would; its exit code."""
    try:
        tree = ast.parse(source, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        exec(compile(tree, name, "exec"), names)
        if last is not None:
            value = eval(compile(last, name, "eval"), names)
            if value is not None:
                print(repr(value))
        return 0
    except SystemExit as leave:
        return leave.code & 255 if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        kind, error, trace = sys.exc_info()
        while trace is not None and trace.tb_frame.f_code is _run.__code__:
            trace = trace.tb_next  # from the cell's own frame on
        traceback.print_exception(kind, error, trace)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _interruptible(source: str, name: str, names: dict[str, object]) -> int:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return _run(source, name, names)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:  # it came while the result was being printed
        return INTERRUPTED


def _reap() -> None:
    """Forget the children that were killed with the last cell: as zombies they count as processes."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the cell may have replaced or closed it
            continue


def serve(requests: int, marks: int) -> NoReturn:
    """Run cells until the request descriptor ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout, sys.stderr = _text_stream(1), _text_stream(2)
    sys.argv = [""]
    main = types.ModuleType("__main__")
    names = main.__dict__
    names["__builtins__"] = builtins
    sys.modules["__main__"] = main
    os.write(marks, b"0 0\n")
    try:
        _cells(requests, marks, names)
    finally:
        os._exit(1)  # a cell has left nothing here that could run the next one, or say what was wrong


def _cells(requests: int, marks: int, names: dict[str, object]) -> NoReturn:
    owner, code = os.getpid(), 0
    while True:
        size, number = struct.unpack(">II", _read(requests, 8))
        if code == INTERRUPTED:
            _reap()
        source = _read(requests, size).decode("utf-8", "replace")
        name = f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        code = _interruptible(source, name, names)
        _flush()
        if os.getpid() != owner:  # the cell forked and its child came back here
            os._exit(code)
        os.write(marks, b"%d %d\n" % (number, code))
