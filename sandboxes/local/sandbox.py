"""One local sandbox: calls become frames to its agent, programs get a cgroup each, and nothing stays.

Invariant: every resource made for the sandbox (process, cgroup, scratch folder, descriptor) is released by
one `close`, each step guarded by itself, even when the caller is cancelled.
Waits: cells of one session for each other; different sessions and commands never.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ..provider import CreateError, DeathCause, Died, ExecResult, FileError, Limits, SandboxError
from .agent_programs import GRACE_S, START_S
from .agent_wire import Header
from .bubblewrap import ENVIRONMENT
from .cgroups import SandboxGroups
from .channel import Channel
from .process import Process

PROVIDER = "local"
ANSWER_S = 30.0  # the agent's own time on top of the program's
MAX_ERROR = 4000


class LocalSandbox:
    """See `provider.Sandbox`. Made by `LocalProvider.create`."""

    def __init__(
        self, name: str, *, limits: Limits, box: str, isolated: bool, groups: SandboxGroups | None,
        scratch: Path | None, on_close: Callable[[LocalSandbox], None],
    ) -> None:  # fmt: skip
        self._id, self._limits, self._box, self._isolated = name, limits, box, isolated
        self._groups, self._scratch, self._on_close = groups, scratch, on_close
        self._channel = Channel(provider=PROVIDER, sandbox_id=name, why_dead=self._why_dead)
        self._process: Process | None = None
        self._errors = os.memfd_create("rz-agent-errors", os.MFD_CLOEXEC)
        self._locks: dict[str, asyncio.Lock] = {}
        self._session_groups: dict[str, tuple[str, int]] = {}  # session -> (group, out-of-memory kills seen)
        self._numbers = itertools.count()
        self._closing: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """Its name, unique on this machine."""
        return self._id

    @property
    def box(self) -> str:
        """The folder in which programs start, as they see it."""
        return self._box

    @property
    def channel(self) -> Channel:
        """For the provider that opens it."""
        return self._channel

    @property
    def errors_fd(self) -> int:
        """Where bubblewrap and the agent write what went wrong."""
        return self._errors

    @property
    def pid(self) -> int | None:
        """The harness's child that holds everything: bubblewrap, or the bare agent."""
        return None if self._process is None else self._process.pid

    def started(self, process: Process) -> None:
        """The provider has started its process."""
        self._process = process

    # -- programs ---------------------------------------------------------------------------------------

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        output_limit: int | None = None,
    ) -> ExecResult:
        """Run a command in the sandbox's shared /box; see `provider.Sandbox.exec`."""
        self._require_life()
        header = self._header("exec", timeout_s, env, output_limit)
        header |= {"argv": list(argv), "cwd": cwd or self._box}
        group = self._new_group()
        try:
            answer, body = await self._call(header | {"cgroup": group}, stdin, header["timeout"])
            return self._result(answer, body, oom=self._oom_kills(group) > 0)
        finally:
            if group and self._groups is not None:
                self._groups.remove(group)

    async def python(self, code: str, *, session: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell; see `provider.Sandbox.python`. A session has its own /box, /tmp and /dev/shm."""
        async with self._locks.setdefault(session, asyncio.Lock()):
            self._require_life()
            header = self._header("cell", timeout_s, None, None)
            header |= {"session": session, "cwd": self._box}
            group, seen = self._session_groups.get(session) or (self._new_group(), 0)
            self._session_groups[session] = (group, seen)
            source = code.encode("utf-8", "surrogatepass")
            answer, body = await self._call(
                header | {"cgroup": group}, source, header["timeout"] + GRACE_S + START_S
            )
            kills = self._oom_kills(group) if answer["code"] else seen
            self._session_groups[session] = (group, kills)
            return self._result(answer, body, oom=kills > seen)

    async def end_session(self, session: str) -> None:
        """Stop a session; see `provider.Sandbox.end_session`."""
        group, _ = self._session_groups.pop(session, ("", 0))
        try:
            await self._call({"op": "end", "session": session}, b"", 0.0)
        finally:
            self._locks.pop(session, None)
            if group and self._groups is not None:
                self._groups.remove(group)

    def _header(
        self, op: str, timeout_s: float | None, env: Mapping[str, str] | None, output_limit: int | None
    ) -> Header:
        limits = self._limits
        bounded = self._groups is not None and self._groups.has("memory")
        return {
            "op": op,
            "env": {**ENVIRONMENT, "HOME": self._box, **(env or {})},
            "timeout": limits.timeout_s if timeout_s is None else timeout_s,
            "cap": limits.output_bytes if output_limit is None else output_limit,
            "flood": limits.flood_bytes,
            "limits": {
                "cpu_s": limits.cpu_s,
                "disk_mb": limits.disk_mb,
                "open_files": limits.open_files,
                # a bare program shares its uid, and so its count, with the rest of the machine
                "pids": limits.pids if self._isolated else 0,
                "address_mb": 0 if bounded else limits.memory_mb,
            },
        }

    def _require_life(self) -> None:
        """Before anything is made for a call."""
        if self._closing is not None:
            raise Died("it was closed", provider=PROVIDER, sandbox_id=self._id, cause="closed")
        self._channel.require_life()

    def _new_group(self) -> str:
        if self._groups is None:
            return ""
        name = f"p{next(self._numbers)}"
        self._groups.add(name, self._limits)
        return name

    def _oom_kills(self, group: str) -> int:
        return self._groups.oom_kills(group) if self._groups is not None and group else 0

    async def _call(self, header: Header, body: bytes, program_s: float) -> tuple[Header, bytes]:
        try:
            answer, data = await self._channel.call(header, body, timeout_s=program_s + ANSWER_S)
        except SandboxError as error:
            if not isinstance(error, Died):  # a silent agent is no use to anybody
                self._channel.fail("lost", f"its agent stopped answering ({error})", error)
            raise
        kind = answer.get("error")
        if kind == "file":
            raise FileError(answer["message"], provider=PROVIDER, sandbox_id=self._id)
        if kind is not None:
            raise CreateError(
                f"a program did not start: {answer['message']}", provider=PROVIDER, sandbox_id=self._id
            )
        return answer, data

    def _result(self, answer: Header, body: bytes, *, oom: bool) -> ExecResult:
        return ExecResult(
            exit_code=answer["code"],
            stdout=body[: answer["out"]],
            stderr=body[answer["out"] :],
            duration_s=answer["duration"],
            stdout_bytes=answer["totals"][0],
            stderr_bytes=answer["totals"][1],
            timed_out=answer["timed_out"],
            oom=oom,
            truncated=answer["cut"],
            flooded=answer["flooded"],
            signal=answer["signal"],
            state_lost=answer["died"],
            fresh=answer["fresh"],
        )

    # -- files and life ---------------------------------------------------------------------------------

    def _path(self, path: str) -> str:
        return os.path.join(self._box, path)

    async def read(self, path: str, *, max_bytes: int = 8 << 20) -> bytes:
        """A file of the shared /box, /tmp or /dev/shm; relative paths start at /box."""
        _, data = await self._call({"op": "read", "path": self._path(path), "max": max_bytes}, b"", 0.0)
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file there atomically, making its folders."""
        await self._call({"op": "write", "path": self._path(path), "mode": mode}, data, 0.0)

    async def reset(self) -> None:
        """Stop every program and drop every file; the agent stays."""
        groups = [group for group, _ in self._session_groups.values()]
        self._session_groups.clear()
        await self._call({"op": "reset"}, b"", 0.0)
        if self._groups is not None:
            for group in groups:
                self._groups.remove(group)

    async def alive(self) -> bool:
        """Whether the agent answers within five seconds."""
        if self._closing is not None or self._channel.dead:
            return False
        try:
            await self._channel.call({"op": "ping"}, timeout_s=5.0)
        except SandboxError:
            return False
        return True

    async def close(self) -> None:
        """Stop everything; a second call waits for the first."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close {self._id}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as steps:  # the last one added runs first, all of them run
            steps.callback(self._on_close, self)
            steps.callback(os.close, self._errors)
            if self._scratch is not None:
                steps.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            if self._groups is not None:
                steps.push_async_callback(self._groups.close)
            if self._process is not None:
                steps.push_async_callback(self._end_process, self._process)
            steps.push_async_callback(self._channel.close)

    async def _end_process(self, process: Process) -> None:
        if not await process.wait(2.0):
            process.kill()
            await process.wait(5.0)
        process.release()

    def error_text(self) -> str:
        """What bubblewrap or the agent said."""
        return os.pread(self._errors, MAX_ERROR, 0).decode("utf-8", "replace").strip()

    def _why_dead(self) -> tuple[DeathCause, str]:
        if self._closing is not None:
            return "closed", "it was closed"
        return "killed", f"its agent ended {self.error_text()}".strip()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
