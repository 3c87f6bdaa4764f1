"""Stateful Python in an E2B sandbox: one Jupyter kernel for each session, through E2B's code interpreter.

Needs a template with the interpreter in it ("code-interpreter-v1" and those built on it). Kernels share the
sandbox's files, user and process table. A cell's output travels as text: bytes that are no UTF-8 are lost in
the kernel, before we see them.

Waits: cells of one session for each other. At its deadline a cell gets SIGINT, a second later its kernel is
killed; a cell that floods likewise.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import CreateError, Misconfigured, SandboxError
from ..exec_result import ExecResult
from ..inside.output import Kept
from ..spec import Limits
from . import sdk
from .sdk import PROVIDER

GRACE_S = 1.0  # between interrupting a cell and killing its kernel
ANSWER_S = 10.0
KILLED = 9
INTERRUPTED = 130
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(slots=True)
class _Kernel:
    context: Any
    pid: int


class _Cell:
    """What one cell has written so far."""

    def __init__(self, limits: Limits) -> None:
        self.out, self.err = Kept(limits.output_bytes), Kept(limits.output_bytes)
        self._flood = limits.flood_bytes
        self.flooded = asyncio.Event()
        self.failure: Any = None

    def print(self, message: Any) -> None:
        """A piece of stdout or stderr."""
        self._add(self.err if message.error else self.out, message.line)

    def show(self, result: Any) -> None:
        """The last expression, as a prompt echoes it; other displays are not text."""
        if result.is_main_result and result.text is not None:
            self._add(self.out, result.text + "\n")

    def fail(self, failure: Any) -> None:
        """An exception left it."""
        self.failure = failure
        self._add(self.err, _COLOUR.sub("", failure.traceback).rstrip("\n") + "\n")

    def _add(self, kept: Kept, text: str) -> None:
        kept.add(text.encode("utf-8", "surrogatepass"))
        if self.out.total + self.err.total > self._flood:
            self.flooded.set()

    @property
    def exit_code(self) -> int:
        """As a program of these lines would have ended."""
        if self.failure is None:
            return 0
        if self.failure.name == "SystemExit":
            return int(self.failure.value) & 255 if self.failure.value.isdecimal() else 1
        return INTERRUPTED if self.failure.name == "KeyboardInterrupt" else 1


@dataclass(slots=True)
class Sessions:
    """The sessions of one sandbox.

    signal    send a signal to a kernel's process group: (name, pid) -> whether there is one
    explain   an SDK error -> ours
    """

    sandbox: Any
    limits: Limits
    cwd: str
    env: dict[str, str]
    template: str
    signal: Callable[[str, int], Awaitable[bool]]
    explain: Callable[[BaseException], Awaitable[SandboxError]]
    _kernels: dict[str, _Kernel] = field(default_factory=dict)
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)

    async def run(self, code: str, *, session: str, timeout_s: float) -> ExecResult:
        """One cell; see `sandbox.Sandbox.python`."""
        async with self._locks.setdefault(session, asyncio.Lock()):
            kernel = self._kernels.get(session)
            fresh = kernel is None
            if kernel is None:
                kernel = self._kernels[session] = await self._open(session)
            try:
                return await self._cell(code, kernel, session, timeout_s, fresh)
            except BaseException:  # cancelled, or the connection was lost: nobody knows its state any more
                await asyncio.shield(self._drop(session))
                raise

    async def end(self, session: str) -> None:
        """Kill its kernel; an unknown name is fine."""
        await self._drop(session)
        self._locks.pop(session, None)

    async def end_all(self) -> None:
        """Kill every kernel."""
        await asyncio.gather(*(self.end(session) for session in list(self._kernels)))

    async def _open(self, session: str) -> _Kernel:
        try:
            context = await self.sandbox.create_code_context(cwd=self.cwd)
            asked = await self.sandbox.run_code(
                "__import__('os').getpid()", context=context, envs=self.env, timeout=ANSWER_S
            )
        except sdk.SDK_ERRORS as error:
            failure = await self._not_opened(error)
        else:
            if asked.text is not None and asked.text.isdecimal():
                return _Kernel(context, int(asked.text))
            failure = CreateError(f"session {session!r} did not start: {asked.error}", provider=PROVIDER)
        raise failure

    async def _not_opened(self, error: BaseException) -> SandboxError:
        absent = isinstance(error, sdk.TimeoutException) and sdk.is_sandbox_port_not_open_message(str(error))
        if not absent:
            return await self.explain(error)
        return Misconfigured(
            f"template {self.template!r} has no code interpreter, so there is no stateful Python\n"
            '  Set sandbox.e2b.template = "code-interpreter-v1", or a template built on it.',
            provider=PROVIDER, sandbox_id=self.sandbox.sandbox_id,
        )  # fmt: skip

    async def _cell(
        self, code: str, kernel: _Kernel, session: str, timeout_s: float, fresh: bool
    ) -> ExecResult:
        cell, begun = _Cell(self.limits), time.monotonic()
        running = asyncio.create_task(self._execute(code, kernel, cell))
        flood = asyncio.create_task(cell.flooded.wait())
        stopped = lost = False
        try:
            await asyncio.wait({running, flood}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            stopped = not running.done()
            if stopped:
                await self.signal("INT", kernel.pid)
                await asyncio.wait({running}, timeout=GRACE_S)
            lost = not running.done() or not await self._survived(running, kernel)
        finally:
            flood.cancel()
            running.cancel()
        if lost:
            await self._drop(session)
        code_of_exit = 128 + KILLED if lost else INTERRUPTED if stopped else cell.exit_code
        return ExecResult(
            exit_code=code_of_exit,
            stdout=cell.out.value(),
            stderr=cell.err.value(),
            duration_s=time.monotonic() - begun,
            stdout_bytes=cell.out.total,
            stderr_bytes=cell.err.total,
            timed_out=stopped and not cell.flooded.is_set(),
            truncated=cell.out.cut or cell.err.cut,
            flooded=cell.flooded.is_set(),
            signal=KILLED if lost else None,
            state_lost=lost,
            fresh=fresh,
        )

    async def _execute(self, code: str, kernel: _Kernel, cell: _Cell) -> Any:
        """Its execution, whose count says that the kernel came to the cell's end."""
        return await self.sandbox.run_code(
            code, context=kernel.context, envs=self.env, timeout=0,
            on_stdout=cell.print, on_stderr=cell.print, on_result=cell.show, on_error=cell.fail,
        )  # fmt: skip

    async def _survived(self, running: asyncio.Task[Any], kernel: _Kernel) -> bool:
        """After a cell's end: whether its kernel lives. Asked only where the end was not a plain one."""
        try:
            execution = running.result()
        except sdk.SDK_ERRORS as error:
            failure = await self.explain(error)
        else:
            plain = execution.error is None and execution.execution_count is not None
            return plain or await self.signal("0", kernel.pid)
        if await self.signal("0", kernel.pid):
            raise failure
        return False

    async def _drop(self, session: str) -> None:
        kernel = self._kernels.pop(session, None)
        if kernel is None:
            return
        with contextlib.suppress(SandboxError, *sdk.SDK_ERRORS):  # what is gone needs no killing
            await self.signal("KILL", kernel.pid)
            await self.sandbox.remove_code_context(kernel.context)
