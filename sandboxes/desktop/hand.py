"""The harness's end of the program that holds a desktop: requests over its stdin, answers over its stdout.

    Hand.start(sandbox, ...)     the archive goes in, the desktop answers when it is ready
    Hand.ask(op, arguments)      one request, one answer; many may be under way, it takes them in turn

Invariant: every request ends, with its answer, `Died` or `CallTimeout`; an answer whose caller was
cancelled is dropped. Waits: a caller for the requests before its own; the reader task for bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Mapping
from typing import Any, Self

from ..errors import CallTimeout, CreateError, DeathCause, Died, Misconfigured, SandboxError, Unavailable
from ..inside.wire import Header, pack, take
from ..sandbox import Process, Sandbox
from .archive import BOOT

PROVIDER = "desktop"
PACKAGES = "xvfb openbox dbus at-spi2-core fonts-dejavu-core libnss-wrapper"  # of Debian
NOT_FOUND = 127  # exit code of a command that does not exist
START_S = 60.0
BUFFER = 64 << 20  # bytes: a screenshot waits there as a whole, however slow its reader is
Answer = tuple[Header, bytes]


class Hand:
    """One desktop's program, started in a sandbox."""

    def __init__(self, process: Process, sandbox_id: str) -> None:
        self._process, self._sandbox_id = process, sandbox_id
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._death: SandboxError | None = None
        # never cancelled while it reads: bytes handed to a cancelled reader would be lost
        self._reader = asyncio.create_task(self._read(), name=f"desktop {sandbox_id}")

    @classmethod
    async def start(
        cls, sandbox: Sandbox, archive: bytes, *, python: str, settings: Mapping[str, Any]
    ) -> Self:
        """Returns when the desktop is there. Unavailable when the sandbox lacks its programs."""
        command = [python, "-I", "-S", "-c", BOOT, str(len(archive)), json.dumps(dict(settings))]
        hand = cls(await sandbox.start(command, output_limit=BUFFER), sandbox.id)
        try:
            hello, _ = await hand._exchange(0, archive, START_S)
            hand._require(hello)
        except TimeoutError:
            await hand.end()
            message = f"the desktop did not start in {START_S:g} s"
            raise CreateError(message, provider=PROVIDER, sandbox_id=sandbox.id) from None
        except Died:
            await hand.end()
            if (await hand._process.wait()).exit_code != NOT_FOUND:
                raise
            message = f"there is no sandbox.desktop.python = {python!r} in it\n  Name one of at least 3.9."
            raise Misconfigured(message, provider=PROVIDER, sandbox_id=sandbox.id) from None
        except BaseException:
            await hand.end()
            raise
        return hand

    def _require(self, hello: Header) -> None:
        if "missing" in hello:
            raise Unavailable(
                f"not in the sandbox: {', '.join(hello['missing'])}\n"
                f"  apt-get install -y --no-install-recommends {PACKAGES}\n"
                "  on this machine for desktops over local, in the image (sandbox.docker.image) over docker.",
                provider=PROVIDER, sandbox_id=self._sandbox_id,
            )  # fmt: skip
        if "failed" in hello:
            message = f"the desktop did not start: {hello['failed']}"
            raise CreateError(message, provider=PROVIDER, sandbox_id=self._sandbox_id)

    async def ask(self, op: str, arguments: Mapping[str, Any], *, timeout_s: float = 30.0) -> Answer:
        """Misconfigured for what the desktop refuses."""
        number = next(self._numbers)
        request = pack({"op": op, "id": number, "arguments": dict(arguments)})
        try:
            header, body = await self._exchange(number, request, timeout_s)
        except TimeoutError:
            await self.end()  # whatever holds this one will hold the next one as well
            message = f"the desktop did not answer to {op!r} in {timeout_s:g} s"
            raise CallTimeout(message, provider=PROVIDER, sandbox_id=self._sandbox_id) from None
        if "error" in header:
            message = f"{op}: {header['error']}"
            raise Misconfigured(message, provider=PROVIDER, sandbox_id=self._sandbox_id)
        return header, body

    async def _exchange(self, number: int, data: bytes, timeout_s: float) -> Answer:
        if self._death is not None:
            raise self._again(self._death)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.write(data)
                return await answer
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        incoming, errors = bytearray(), bytearray()
        try:
            while True:
                output = await self._process.read(timeout_s=60.0)
                incoming += output.stdout
                errors = (errors + output.stderr)[-4000:]
                while (frame := take(incoming)) is not None:
                    answer = self._waiting.get(frame[0]["id"])
                    if answer is not None and not answer.done():
                        answer.set_result(frame)
                if output.ended:
                    self._fail(await self._ended(errors.decode("utf-8", "replace").strip()))
                    return
        except SandboxError as error:
            self._fail(error)
        except ValueError as error:  # what it wrote is no frame: programs on the desktop can do that to it
            self._fail(self._died(f"its desktop answers nonsense: {error}", oom=False))
        finally:
            if self._death is None:  # cancelled, with the program that it read from
                self._fail(self._died("its desktop was stopped", oom=False))

    async def _ended(self, words: str) -> Died:
        result = await self._process.wait()
        message = f"its desktop ended with status {result.exit_code}. {words}".strip()
        return self._died(message, oom=result.oom)

    def _died(self, message: str, *, oom: bool) -> Died:
        cause: DeathCause = "oom" if oom else "killed"
        return Died(message, provider=PROVIDER, sandbox_id=self._sandbox_id, cause=cause)

    def _fail(self, error: SandboxError) -> None:
        self._death = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._again(error))

    def _again(self, error: SandboxError) -> SandboxError:
        return error.again() if isinstance(error, Died) else error

    @property
    def alive(self) -> bool:
        """Whether the program is not known to have ended."""
        return self._death is None

    async def end(self) -> None:
        """End it with all that runs on the desktop. Does not raise when the sandbox is gone."""
        with contextlib.suppress(SandboxError):
            await self._process.kill()
        await asyncio.wait([self._reader])
