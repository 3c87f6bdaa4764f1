"""The harness's end of the channel to one agent: many calls in flight, told apart by their id.

The channel is a socket, the agent's own or that of a daemon which passes its bytes on, or a pair of pipes.
Invariant: every call ends. It gets its answer, or `Died` when the socket ends, or `CallTimeout` when the
agent itself is silent. A cancelled call tells the agent to stop its program.
Waits: a call for its own answer; the reader task for bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from ..errors import Blame, CallTimeout, CreateError, DeathCause, Died, Misconfigured, SandboxError
from ..inside.wire import LENGTH, MAX_HEADER, NOT_PRELOADED, Header, pack

MAX_BODY = 256 << 20
WhyDead = Callable[[], Awaitable[tuple[DeathCause, str]]]


class Incoming(Protocol):
    """The agent's bytes; an `asyncio.StreamReader` is one."""

    async def readexactly(self, n: int) -> bytes:
        """EOFError when they end before."""
        ...


class Channel:
    """One agent's socket. `why_dead` is asked once, when the socket has ended."""

    def __init__(self, *, provider: str, sandbox_id: str, why_dead: WhyDead) -> None:
        self._provider, self._sandbox_id, self._why_dead = provider, sandbox_id, why_dead
        self._waiting: dict[int, asyncio.Future[tuple[Header, bytes]]] = {}
        self._ids = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._death: Died | None = None

    @property
    def dead(self) -> bool:
        """Whether the agent is known to be gone."""
        return self._death is not None

    async def open(
        self, reader: Incoming, writer: asyncio.StreamWriter, settings: Header, timeout_s: float
    ) -> Header:
        """Send the first frame and return the agent's greeting.

        TimeoutError, or EOFError when it ended; CreateError or Misconfigured when it says what is wrong.
        """
        self._writer = writer
        async with asyncio.timeout(timeout_s):
            writer.write(pack(settings))
            hello, _ = await self._frame(reader)
        if "failed" in hello:
            raise self._not_started(str(hello["failed"]))
        self._task = asyncio.create_task(self._read(reader), name=f"sandbox {self._sandbox_id}")
        return hello

    def _not_started(self, text: str) -> SandboxError:
        _, found, module = text.partition(NOT_PRELOADED)
        if not found:
            return CreateError(f"did not start: {text}", provider=self._provider)
        return Misconfigured(
            f"sandbox.{self._provider}.preload names a module that cannot be imported: {module}\n"
            "  Install it for the Python in the sandbox, or take it off the list.",
            provider=self._provider,
        )

    async def call(self, header: Header, body: bytes = b"", *, timeout_s: float) -> tuple[Header, bytes]:
        """One request and its answer."""
        return await self.answer(self.begin(header, body), str(header["op"]), timeout_s=timeout_s)

    def begin(self, header: Header, body: bytes = b"") -> int:
        """Send a request; the number by which its `answer` is awaited."""
        number = next(self._ids)
        answer: asyncio.Future[tuple[Header, bytes]] = asyncio.get_running_loop().create_future()
        self._send({**header, "id": number}, body)
        self._waiting[number] = answer
        return number

    async def answer(self, number: int, op: str, *, timeout_s: float | None) -> tuple[Header, bytes]:
        """The answer to a request that was sent; None waits as long as the agent lives."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._waiting[number]
        except TimeoutError:
            message = f"no answer to {op!r} in {timeout_s:g} s"
            raise CallTimeout(message, provider=self._provider, sandbox_id=self._sandbox_id) from None
        except asyncio.CancelledError:
            with contextlib.suppress(Died):
                self._send({"op": "cancel", "id": next(self._ids), "target": number})
            raise
        finally:
            self._waiting.pop(number, None)

    def require_life(self) -> None:
        """Died when the agent is known to be gone."""
        if self._death is not None:
            raise self._death.again()

    def _send(self, header: Header, body: bytes = b"") -> None:
        self.require_life()
        assert self._writer is not None, "call() before open()"
        self._writer.write(pack(header, body))

    async def _frame(self, reader: Incoming) -> tuple[Header, bytes]:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if size > MAX_HEADER:
            raise ValueError(f"frame header of {size} bytes")
        header: Header = json.loads(await reader.readexactly(size))
        length = int(header["n"])
        if not 0 <= length <= MAX_BODY:
            raise ValueError(f"frame body of {length} bytes")
        return header, await reader.readexactly(length)

    async def _read(self, reader: Incoming) -> None:
        try:
            while True:
                header, body = await self._frame(reader)
                answer = self._waiting.get(header["id"])
                if answer is not None and not answer.done():
                    answer.set_result((header, body))
        except (EOFError, OSError, ValueError, KeyError) as error:
            self.fail(*await self._why_dead(), error)

    def fail(self, cause: DeathCause, message: str, error: BaseException | None = None) -> None:
        """Every waiter, now and later, gets `Died`."""
        if self._death is None:
            blame: Blame = "program" if cause == "oom" else "infra"
            self._death = Died(
                message, provider=self._provider, sandbox_id=self._sandbox_id, cause=cause, blame=blame
            )
            self._death.__cause__ = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._death.again())

    async def close(self) -> None:
        """End the socket for every copy of it, in forked processes too."""
        self.fail("closed", "it was closed")
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._writer is not None:
            if (ours := self._writer.get_extra_info("socket")) is not None:  # None for a pipe
                # By a copy: what uvloop gives cannot be shut down itself.
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(ours.fileno())) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
            self._writer.close()
