"""The harness's end of the program that holds a desktop: requests over its stdin, answers over its stdout.

    Hand.start(sandbox, ...)     the archive goes in, the desktop answers when it is ready
    Hand.ask(op, arguments)      one request, one answer; many may be under way, it takes them in turn

Invariant: every request ends, with its answer or a SandboxError, whatever the programs on the desktop do to
it: they can end it or stop it. Then it has died, and in a sandbox that lives and answers they are to blame.
An answer whose caller was cancelled is dropped.
Waits: a caller for the requests before its own; the reader task for bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from ..errors import CreateError, DeathCause, Died, Misconfigured, SandboxError, Unavailable
from ..inside.wire import Header, pack
from ..sandbox import Process, Sandbox
from .archive import BOOT
from .frames import Answer, Frames

PROVIDER = "desktop"
PACKAGES = "xvfb openbox dbus at-spi2-core fonts-dejavu-core libnss-wrapper"  # of Debian
NOT_FOUND = 127  # exit code of a command that does not exist
START_S = 60.0
ANSWER_S = 30.0
BUFFER = 64 << 20  # bytes: a screenshot waits there as a whole, however slow its reader is
T = TypeVar("T")


class Hand:
    """One desktop's program, started in a sandbox."""

    def __init__(self, process: Process, sandbox: Sandbox, frames: Frames) -> None:
        self._process, self._sandbox, self._sandbox_id, self._frames = process, sandbox, sandbox.id, frames
        self._numbers = itertools.count(1)
        self._owed = set[int]()  # numbers of the requests that it has not answered
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._death: SandboxError | None = None
        # never cancelled while it reads: bytes handed to a cancelled reader would be lost
        self._reader = asyncio.create_task(self._read(), name=f"desktop {sandbox.id}")

    @classmethod
    async def start(
        cls, sandbox: Sandbox, archive: bytes, *, python: str, size: tuple[int, int], a11y: bool
    ) -> Self:
        """Returns when the desktop is there. Unavailable when the sandbox lacks its programs."""
        settings = json.dumps({"size": size, "a11y": a11y})
        command = [python, "-I", "-S", "-c", BOOT, str(len(archive)), settings]
        process = await sandbox.start(command, output_limit=BUFFER)
        hand = cls(process, sandbox, Frames(size, tree=a11y))
        try:
            hello, _ = await hand._exchange(0, archive, START_S)
            hand._require(hello)
        except TimeoutError:
            await hand.end()
            message = f"the desktop did not start in {START_S:g} s"
            raise CreateError(message, provider=PROVIDER, sandbox_id=sandbox.id) from None
        except Died as error:
            await hand.end()
            if (await process.wait()).exit_code != NOT_FOUND:
                message = f"the desktop did not start: {error}"  # no program has run that could have ended it
                raise CreateError(message, provider=PROVIDER, sandbox_id=sandbox.id) from error
            message = f"there is no sandbox.desktop.python = {python!r} in it\n  Name one of at least 3.9."
            raise Misconfigured(message, provider=PROVIDER, sandbox_id=sandbox.id) from None
        except BaseException:
            await hand.end()
            raise
        return hand

    def _require(self, hello: Header) -> None:
        if "missing" in hello:
            raise Unavailable(
                f"not in the sandbox: {', '.join(map(str, hello['missing']))}\n"
                f"  apt-get install -y --no-install-recommends {PACKAGES}\n"
                "  on this machine for desktops over local, in the image (sandbox.docker.image) over\n"
                "  docker, in the template (sandbox.e2b.template) over e2b.",
                provider=PROVIDER, sandbox_id=self._sandbox_id,
            )  # fmt: skip
        if "failed" in hello:
            message = f"the desktop did not start: {hello['failed']}"
            raise CreateError(message, provider=PROVIDER, sandbox_id=self._sandbox_id)

    async def ask(
        self,
        op: str,
        arguments: Mapping[str, Any],
        read: Callable[[Header, bytes], T],
        *,
        longer_s: float = 0.0,
    ) -> T:
        """What `read` makes of the answer; its ValueError is the end of the desktop. Or a SandboxError."""
        number, seconds = next(self._numbers), ANSWER_S + longer_s
        request = pack({"op": op, "id": number, "arguments": dict(arguments)})
        try:
            header, body = await self._exchange(number, request, seconds)
            if "error" in header:
                raise ValueError(header["error"])
            return read(header, body)
        except TimeoutError:  # whatever holds this request will hold the next one as well
            wrong = f"the desktop did not answer to {op!r} in {seconds:g} s"
        except ValueError as error:
            wrong = f"{op}: {error}"
        died = await self._died(wrong)
        await self.end(died)
        raise died

    async def _exchange(self, number: int, data: bytes, timeout_s: float) -> Answer:
        if self._death is not None:
            raise _again(self._death)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._owed.add(number)
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.write(data)
                return await answer
        finally:
            del self._waiting[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # looked at: where `write` failed as well, nobody has awaited it

    async def _read(self) -> None:
        errors = b""
        try:
            while True:
                output = await self._process.read(timeout_s=60.0)
                errors = (errors + output.stderr)[-4000:]
                for header, body in self._frames.cut(output.stdout):
                    self._answered(header, body)
                if output.ended:
                    self._fail(await self._ended(errors.decode("utf-8", "replace").strip()))
                    return
        except SandboxError as error:
            self._fail(error)
        except ValueError as error:
            self._fail(await self._died(f"its desktop answers nonsense: {error}"))
        finally:
            self._fail(self._closed())  # cancelled, with the program that it read from

    def _answered(self, header: Header, body: bytes) -> None:
        number = header.get("id")
        if type(number) is not int or number not in self._owed:
            raise ValueError("an answer to nothing that was asked")
        self._owed.remove(number)
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_result((header, body))

    async def _ended(self, words: str) -> Died:
        result = await self._process.wait()
        message = f"its desktop ended with status {result.exit_code}. {words}".strip()
        return await self._died(message, cause="oom" if result.oom else "ended")

    async def _died(self, message: str, *, cause: DeathCause = "ended") -> Died:
        """By its programs' doing, when the sandbox around them answers."""
        if await self._sandbox.alive():
            return Died(message, provider=PROVIDER, sandbox_id=self._sandbox_id, cause=cause, blame="program")
        return Died(message, provider=PROVIDER, sandbox_id=self._sandbox_id, cause="lost")

    def _closed(self) -> Died:
        return Died("its desktop was stopped", provider=PROVIDER, sandbox_id=self._sandbox_id, cause="closed")

    def _fail(self, error: SandboxError) -> None:
        """Every waiter, now and later, gets the first of these."""
        self._death = self._death or error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_again(self._death))

    @property
    def alive(self) -> bool:
        """Whether the program is not known to have ended."""
        return self._death is None

    async def end(self, why: SandboxError | None = None) -> None:
        """End it with all that runs on the desktop. Does not raise when the sandbox is gone."""
        self._fail(why or self._closed())
        with contextlib.suppress(SandboxError):
            await self._process.kill()
        await asyncio.wait([self._reader])


def _again(error: SandboxError) -> SandboxError:
    return error.again() if isinstance(error, Died) else error
