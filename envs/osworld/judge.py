"""Where what the policy made is read and judged: in processes that can be killed.

    judge = Judge()
    await judge.call(function, *values, **options)      a plain function of a module; JSON in, JSON out
    await judge.aclose()

A file that an agent left may be a bomb: a regular expression that never ends, a workbook that unpacks to the
whole memory, a database whose table is an endless view. So nothing of it is parsed in the process that holds
the run. One process (`judge_process.py`) has the libraries loaded and forks for each call.

Invariants: a call ends by its deadline and a grace; it has MEMORY of its own, and what it does to its process
touches no other. A call that ends without an answer is `NotJudged`, for what it was given made it so; a judge
that cannot be started, or is lost while it judges, is an `InfraFailure`.
Waits: a call for one of AT_ONCE places, in which time the clocks of its episode stand still, and for its own
process; the first one for the libraries to be loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from ...errors import ConfigError
from ...sandboxes.deadline import waiting
from ..failure import InfraFailure
from .judge_process import READY
from .metrics.reading import Unreadable

DEADLINE_S = 120.0
START_S = 120.0
GRACE_S = 10.0
ENDING_S = 0.5  # until the end of a process that was killed is known
MEMORY = 2 << 30  # bytes of address space of one call
MAX_ANSWER = 16 << 20
AT_ONCE = 4  # of MEMORY each


class NotJudged(Exception):
    """It raised, ran out of time or out of memory: the message says which."""


class Judge:
    """See the module. Any number of calls side by side, all on one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def call(self, function: Callable[..., Any], /, *values: Any, **options: Any) -> Any:
        """What the function returns. `Unreadable`, `FileNotFoundError`, `ConfigError` and `InfraFailure` are
        raised here as they are there, all else as `NotJudged`."""
        job = {
            "module": function.__module__, "name": function.__qualname__,
            "values": values, "options": options, "seconds": DEADLINE_S, "memory": MEMORY,
        }  # fmt: skip
        try:
            given = json.dumps(job).encode()
        except RecursionError as error:  # what a getter brought is nested nearly as deep as can be
            raise NotJudged(f"it cannot be handed on: {error}") from error
        with waiting():
            await self._places.acquire()
        try:
            answer = await self._asked(given)
        finally:
            self._places.release()
        if not answer:
            raise NotJudged(f"it ended without an answer: it had {DEADLINE_S:g} s and {MEMORY >> 20} MiB")
        if len(answer) > MAX_ANSWER:
            raise NotJudged(f"its answer has more than {MAX_ANSWER >> 20} MiB")
        try:
            said = json.loads(answer)
        except (ValueError, RecursionError) as error:  # cut off by its deadline, or nested too deep for here
            raise NotJudged(f"its answer cannot be read: {error}") from error
        return _value(said)

    async def aclose(self) -> None:
        """End it with all that it judges. Idempotent."""
        process, self._process = self._process, None
        folder, self._folder = self._folder, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
        if folder is not None:
            folder.cleanup()

    async def _asked(self, job: bytes) -> bytes:
        try:
            reader, writer = await asyncio.open_unix_connection(await self._started())
        except OSError as error:
            raise InfraFailure(f"the judge is gone: {error}") from error
        process, answer = self._process, bytearray()
        try:
            async with asyncio.timeout(DEADLINE_S + GRACE_S):
                writer.write(job)
                writer.write_eof()
                while len(answer) <= MAX_ANSWER and (piece := await reader.read(1 << 20)):
                    answer += piece
        except (TimeoutError, OSError):  # its process was killed, or should have been
            answer.clear()
        finally:
            writer.close()
        if not answer and await self._is_lost(process):
            raise InfraFailure("the judge was lost while it judged")
        return bytes(answer)

    async def _is_lost(self, process: asyncio.subprocess.Process | None) -> bool:
        """Whether the process that took a call has ended, or is ending."""
        if process is None or process is not self._process:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), ENDING_S)
        return process.returncode is not None

    async def _started(self) -> str:
        """The path of its socket."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self.aclose()
                try:
                    await self._start()
                except BaseException:
                    await self.aclose()
                    raise
            assert self._folder is not None
            return f"{self._folder.name}/socket"

    async def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rz-judge-")
        found = os.pathsep.join(path or os.curdir for path in sys.path)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-W", "ignore", "-m", f"{__package__}.judge_process",
            f"{self._folder.name}/socket",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": os.defpath, "PYTHONPATH": found, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                said = await self._process.stdout.readline()
                if said == READY:
                    return
                said += await self._process.stdout.read()
        except TimeoutError:
            said = b"it was not ready in %d s" % START_S
        raise InfraFailure(f"the judge did not start: {said.decode(errors='replace').strip()[-500:]}")


def _value(answer: dict[str, Any]) -> Any:
    """The value, or the error that was raised there."""
    if "value" in answer:
        return answer["value"]
    told = answer["told"]
    raised: dict[str, Callable[[], Exception]] = {
        "Unreadable": lambda: Unreadable(told["path"], told["why"]),
        "ConfigError": lambda: ConfigError(**told),
        "FileNotFoundError": lambda: FileNotFoundError(told),
        "InfraFailure": lambda: InfraFailure(told),
    }
    raise raised.get(answer["error"], lambda: NotJudged(f"{answer['error']}: {told}"))()
