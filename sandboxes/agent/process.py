"""A started program at the other end of a channel. Its life is one long call, answered at its end.

    start ----------------------------------------------> answer: its ExecResult
       |-- input (bytes, end)   |-- output   |-- stop      every other frame names that call's number

Invariant: each byte it wrote is seen once: by `read`, or after its end by `wait` and the `read` that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine

from ..errors import SandboxError
from ..exec_result import ExecResult
from ..inside.wire import Header
from ..sandbox import Output

Call = Callable[[Header, bytes, float], Awaitable[tuple[Header, bytes]]]


class AgentProcess:
    """See `sandbox.Process`. `call` asks the agent; `life` is the long call."""

    def __init__(self, call: Call, number: int, life: Coroutine[None, None, ExecResult]) -> None:
        self._call, self._number = call, number
        self.ended = asyncio.create_task(life, name=f"program {number}")
        self.ended.add_done_callback(lambda task: task.cancelled() or task.exception())  # "never retrieved"
        self._rest_read = False

    async def write(self, data: bytes) -> None:
        """To its stdin; waits until it has all been taken."""
        await self._ask({"op": "input", "end": False}, data, 3600.0)

    async def end_input(self) -> None:
        """Its stdin ends here."""
        await self._ask({"op": "input", "end": True}, b"", 3600.0)

    async def read(self, *, timeout_s: float) -> Output:
        """What came since the last read; waits for some, for the end, or for `timeout_s`."""
        if not self.ended.done():
            answer, body = await self._ask({"op": "output", "wait": timeout_s}, b"", timeout_s)
            if not answer["ended"]:
                return Output(stdout=body[: answer["out"]], stderr=body[answer["out"] :], ended=False)
        rest = await self.wait()
        if self._rest_read:
            return Output(stdout=b"", stderr=b"", ended=True)
        self._rest_read = True
        return Output(stdout=rest.stdout, stderr=rest.stderr, ended=True)

    async def wait(self) -> ExecResult:
        """Its end. A cancelled wait leaves it running."""
        return await asyncio.shield(self.ended)

    async def kill(self) -> None:
        """End it with all that it started, and wait for that."""
        if not self.ended.done():
            await self._ask({"op": "stop"}, b"", 0.0)
            await asyncio.shield(self.ended)

    async def forget(self) -> None:
        """The sandbox is gone, and with it the program."""
        self.ended.cancel()
        with contextlib.suppress(asyncio.CancelledError, SandboxError):
            await self.ended

    async def _ask(self, header: Header, body: bytes, seconds: float) -> tuple[Header, bytes]:
        return await self._call({**header, "target": self._number}, body, seconds)
