"""A sandbox that is one agent at the other end of a channel: calls become frames, whoever carries them.

    AgentSandbox        programs, sessions, files, snapshots: the same for every provider with an agent
    its provider's own  how the agent was started, what bounds a program, what has to be removed at the end

Invariant: `close` releases all that was made, each step guarded by itself, even when its caller is cancelled.
Waits: cells of one session for each other; different sessions and commands never.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Self

from ..errors import (
    CallTimeout,
    CreateError,
    DeathCause,
    Died,
    FileError,
    Hindered,
    SandboxError,
    Unsupported,
)
from ..exec_result import ExecResult
from ..inside.programs import GRACE_S, START_S
from ..inside.wire import Header
from ..sandbox import FileEntry, Snapshot
from ..spec import Limits
from .channel import MAX_BODY, Channel
from .process import AgentProcess

ANSWER_S = 30.0  # the agent's own time on top of the program's
PACK_S = 60.0
NOT_FOUND = 127  # exit code of a command that does not exist: an image without tar
OUT_OF_MEMORY: tuple[DeathCause, str] = (
    "oom",
    "the kernel ended its agent for want of memory, which its files and programs had taken",
)
EXPIRED: tuple[DeathCause, str] = ("expired", "its lifetime was over and nobody had kept it alive")
# What lies in the folders, not the folders: /tmp may belong to root, and unpacking must not touch it.
_PACK_IN = 'cd / && find "$@" -mindepth 1 -maxdepth 1 -print0 | tar --create --file=- --null --files-from=- '
_PACK = ("sh", "-c", f"{_PACK_IN} --sparse --numeric-owner --no-xattrs", "sh")
_UNPACK = ("tar", "--extract", "--file=-", "--directory=/", "--no-same-owner", "--skip-old-files")


class AgentSandbox:
    """See `sandbox.Sandbox`. A provider derives its own, with `_release` and what bounds a program.

    folders     writable ones, absolute; the first is where programs start
    bounded     whether something else than the address space bounds a program's memory
    own_uid     whether a program's processes can be counted by its uid
    lifetime_s  s that its agent was told to live for; None: as long as its channel
    """

    def __init__(
        self, name: str, *, provider: str, limits: Limits, folders: Sequence[str],
        environment: Mapping[str, str], bounded: bool, own_uid: bool, lifetime_s: float | None = None,
    ) -> None:  # fmt: skip
        self._id, self._provider, self._limits, self._folders = name, provider, limits, tuple(folders)
        self._environment = {**environment, "HOME": self.box}
        self._bounded, self._own_uid = bounded, own_uid
        # Read before the agent hears of it, here and in `keepalive`: what it lives for is over here first.
        self._ends = float("inf") if lifetime_s is None else time.monotonic() + lifetime_s
        self._channel = Channel(provider=provider, sandbox_id=name, why_dead=self._why_dead)
        self._locks: dict[str, asyncio.Lock] = {}
        self._session_groups: dict[str, tuple[str, int]] = {}  # session -> (group, out-of-memory kills seen)
        self._processes: set[AgentProcess] = set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """Its name, unique for its provider."""
        return self._id

    @property
    def box(self) -> str:
        """The folder in which programs start, as they see it."""
        return self._folders[0]

    @property
    def folders(self) -> tuple[str, ...]:
        """The writable ones, as programs see them."""
        return self._folders

    @property
    def channel(self) -> Channel:
        """For the provider that opens it."""
        return self._channel

    # -- what a provider adds ---------------------------------------------------------------------------

    def _new_group(self) -> str:
        """A bound for one more program, by name; "" where there is none."""
        return ""

    def _remove_group(self, group: str) -> None:
        """Drop such a bound. Does not raise."""

    def _oom_kills(self, group: str) -> int:
        """Processes of that program that the kernel has killed for memory so far."""
        return 0

    async def _release(self, steps: contextlib.AsyncExitStack) -> None:
        """Push what has to be undone once the channel is closed; the last one pushed runs first."""
        raise NotImplementedError

    async def _why_dead(self) -> tuple[DeathCause, str]:
        """Asked once, when the channel has ended."""
        raise NotImplementedError

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
        """Run a command in the sandbox's shared files; see `sandbox.Sandbox.exec`."""
        self._require_life()
        seconds = self._limits.timeout_s if timeout_s is None else timeout_s
        header = self._header("exec", seconds, env, output_limit)
        return await self._command(header | {"argv": list(argv), "cwd": cwd or self.box}, stdin, seconds)

    async def _command(self, header: Header, stdin: bytes, seconds: float) -> ExecResult:
        group = self._new_group()
        try:
            answer, body = await self._call(header | {"cgroup": group}, stdin, seconds)
            return self._result(answer, body, oom=self._oom_kills(group) > 0)
        finally:
            self._remove_group(group)

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        output_limit: int | None = None,
    ) -> AgentProcess:
        """Start a command and talk with it; see `sandbox.Sandbox.start`."""
        self._require_life()
        header = self._header("start", timeout_s, env, output_limit)
        header |= {"argv": list(argv), "cwd": cwd or self.box}
        group = self._new_group()
        number = self._channel.begin(header | {"cgroup": group})
        process = AgentProcess(self._call, number, self._life(number, group, timeout_s))
        self._processes.add(process)
        process.ended.add_done_callback(lambda _: self._processes.discard(process))
        return process

    async def _life(self, number: int, group: str, timeout_s: float | None) -> ExecResult:
        try:
            seconds = None if timeout_s is None else timeout_s + ANSWER_S
            answer, body = await self._answered(self._channel.answer(number, "start", timeout_s=seconds))
            return self._result(answer, body, oom=self._oom_kills(group) > 0)
        finally:
            self._remove_group(group)

    async def python(self, code: str, *, session: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell; see `sandbox.Sandbox.python`. A session has files of its own."""
        async with self._locks.setdefault(session, asyncio.Lock()):
            self._require_life()
            seconds = self._limits.timeout_s if timeout_s is None else timeout_s
            header = self._header("cell", seconds, None, None) | {"session": session, "cwd": self.box}
            group, seen = self._session_groups.get(session) or (self._new_group(), 0)
            self._session_groups[session] = (group, seen)
            source = code.encode("utf-8", "surrogatepass")
            answer, body = await self._call(header | {"cgroup": group}, source, seconds + GRACE_S + START_S)
            kills = self._oom_kills(group) if answer["code"] else seen
            if session in self._session_groups:  # else it was ended meanwhile, and its group with it
                self._session_groups[session] = (group, kills)
            return self._result(answer, body, oom=kills > seen)

    async def end_session(self, session: str) -> None:
        """Stop a session; see `sandbox.Sandbox.end_session`."""
        group, _ = self._session_groups.pop(session, ("", 0))
        try:
            await self._call({"op": "end", "session": session}, b"", 0.0)
        finally:
            self._locks.pop(session, None)
            self._remove_group(group)

    def _header(
        self, op: str, timeout_s: float | None, env: Mapping[str, str] | None, output_limit: int | None
    ) -> Header:
        limits = self._limits
        if timeout_s is not None and math.isnan(timeout_s):
            raise ValueError("timeout_s = nan is no number of seconds: give one, or None for the usual")
        return {
            "op": op,
            "env": {**self._environment, **(env or {})},
            "timeout": timeout_s,
            "cap": limits.output_bytes if output_limit is None else output_limit,
            "flood": limits.flood_bytes,
            "limits": {
                "cpu_s": limits.cpu_s,
                "disk_mb": limits.disk_mb,
                "open_files": limits.open_files,
                # processes that share their uid with the rest of the machine cannot be counted by it
                "pids": limits.pids if self._own_uid else 0,
                "address_mb": 0 if self._bounded else limits.memory_mb,
            },
        }

    def _require_life(self) -> None:
        """Before anything is made for a call."""
        if self._closing is not None:
            raise Died("it was closed", provider=self._provider, sandbox_id=self._id, cause="closed")
        self._channel.require_life()

    async def _call(self, header: Header, body: bytes, program_s: float) -> tuple[Header, bytes]:
        return await self._answered(self._channel.call(header, body, timeout_s=program_s + ANSWER_S))

    async def _answered(self, call: Awaitable[tuple[Header, bytes]]) -> tuple[Header, bytes]:
        try:
            answer, data = await call
        except SandboxError as error:
            if not isinstance(error, Died):  # a silent agent is no use to anybody
                self._channel.fail("lost", f"its agent stopped answering ({error})", error)
            raise
        kind = answer.get("error")
        if kind == "file":
            raise FileError(answer["message"], provider=self._provider, sandbox_id=self._id)
        if kind == "hindered":
            message = f"its programs are in the way: {answer['message']}"
            raise Hindered(message, provider=self._provider, sandbox_id=self._id)
        if kind is not None:
            what = "it could not be reset" if kind == "reset" else "a program did not start"
            message = f"{what}: {answer['message']}"
            raise CreateError(message, provider=self._provider, sandbox_id=self._id)
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
            oom=oom or answer.get("oom", False),
            truncated=answer["cut"],
            flooded=answer["flooded"],
            signal=answer["signal"],
            state_lost=answer["died"],
            fresh=answer["fresh"],
        )

    # -- files ------------------------------------------------------------------------------------------

    def _path(self, path: str) -> str:
        return os.path.join(self.box, path)

    async def read(self, path: str, *, max_bytes: int = 8 << 20) -> bytes:
        """A file of the writable folders; relative paths start at the first of them."""
        _, data = await self._call({"op": "read", "path": self._path(path), "max": max_bytes}, b"", 0.0)
        return data

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file there atomically, making its folders."""
        await self._call({"op": "write", "path": self._path(path), "mode": mode}, data, 0.0)

    async def list_dir(self, path: str) -> list[FileEntry]:
        """What lies in a folder of the writable ones."""
        _, body = await self._call({"op": "list", "path": self._path(path)}, b"", 0.0)
        return [FileEntry(name=name, kind=kind, size=size) for name, kind, size in json.loads(body)]

    async def snapshot(self) -> Snapshot:
        """A tar of the writable folders, in this process's memory."""
        self._require_life()
        # Twice what the disks hold, for the names of files; what one frame carries, beside tar's complaints.
        limit = min((self._limits.disk_mb * len(self._folders) + 1) << 21, MAX_BODY - (1 << 20))
        names = [folder.lstrip("/") for folder in self._folders]
        header = self._header("exec", PACK_S, None, 2 * limit) | {"flood": limit}
        header |= {"argv": [*_PACK, *names], "cwd": self.box}
        alone = not self._processes and not self._session_groups
        packed = await self._command(header, b"", PACK_S)
        self._in_time(packed, "packed", alone=alone)
        if packed.flooded:
            message = f"its files are too many for a snapshot: more than {limit >> 20} MiB as a tar"
            raise FileError(message, provider=self._provider, sandbox_id=self._id)
        # 1: a file changed while it was read, as files of running programs do
        if packed.exit_code > 1:
            wrong = Unsupported if packed.exit_code == NOT_FOUND else FileError
            message = f"its files could not be packed: {_words(packed)}"
            raise wrong(message, provider=self._provider, sandbox_id=self._id)
        return Snapshot(provider=self._provider, ref=self._id, archive=packed.stdout)

    async def reset(self, *, to: Snapshot | None = None) -> None:
        """Stop every program and drop every file; the agent stays. Then the files of `to`."""
        groups = [group for group, _ in self._session_groups.values()]
        self._session_groups.clear()
        await self._call({"op": "reset"}, b"", 0.0)
        for group in groups:
            self._remove_group(group)
        if to is not None:
            unpacked = await self.exec(_UNPACK, stdin=to.archive, timeout_s=PACK_S)
            self._in_time(unpacked, "unpacked", alone=True)
            if unpacked.exit_code:  # programs made the files: deeper folders than a path can name, say
                wrong = Unsupported if unpacked.exit_code == NOT_FOUND else FileError
                message = f"its files could not be unpacked: {_words(unpacked)}"
                raise wrong(message, provider=self._provider, sandbox_id=self._id)

    def _in_time(self, result: ExecResult, what: str, *, alone: bool) -> None:
        """Its disks hold a second's work: late, programs beside it are at fault, or else the machine is."""
        if result.timed_out:
            late = CallTimeout if alone else FileError
            message = f"its files were not {what} in {PACK_S:g} s"
            raise late(message, provider=self._provider, sandbox_id=self._id)

    # -- life -------------------------------------------------------------------------------------------

    async def keepalive(self, ttl_s: float) -> None:
        """It lives for at least that long from now: its agent ends by itself when its time is over."""
        self._require_life()
        ends = time.monotonic() + ttl_s
        await self._call({"op": "keepalive", "seconds": ttl_s}, b"", 0.0)
        self._ends = max(self._ends, ends)

    @property
    def _expired(self) -> bool:
        """Whether its time is over, for `_why_dead`."""
        return time.monotonic() >= self._ends

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
        async with contextlib.AsyncExitStack() as steps:
            await self._release(steps)
            for process in list(self._processes):
                steps.push_async_callback(process.forget)
            steps.push_async_callback(self._channel.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _words(result: ExecResult) -> str:
    return result.stderr.decode(errors="replace").strip()[:500]
