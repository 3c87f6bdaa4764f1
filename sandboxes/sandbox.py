"""One isolated place where untrusted code runs, and one program that is talked with while it runs.

    Sandbox.python(code, session=...)      one cell of a stateful interpreter; a new name starts one
    Sandbox.exec(argv)                     one command, from a clean process to its end
    Sandbox.start(argv) -> Process         one command that is written to and read from meanwhile

Invariant: what the *program* did (exit code, timeout, out of memory, flood of output) is an `ExecResult`;
what the *place* did (could not start, died, does not answer) is a `SandboxError`. An error with
blame="infra" makes the episode invalid: masked from the loss, never reward 0. One with blame="program" is the
program's doing after all: a file that is not there, a desktop that it ended.
Waits: a caller for its own program, at most `timeout_s` and a fixed grace; no caller for another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from .exec_result import ExecResult


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One name in a folder. `size` in bytes, of regular files."""

    name: str
    kind: Literal["file", "folder", "link", "other"]
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Its files at one moment: `ref` is what the provider calls them, `archive` a tar where need be."""

    provider: str
    ref: str
    archive: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a running program wrote since the last look. After `ended` nothing more comes."""

    stdout: bytes
    stderr: bytes
    ended: bool


class Process(Protocol):
    """A program that was started and is talked with. Raises `Died` like its sandbox."""

    async def write(self, data: bytes) -> None:
        """To its stdin; waits until it has all been taken. What an ended or deaf program gets is dropped."""
        ...

    async def end_input(self) -> None:
        """Its stdin ends here."""
        ...

    async def read(self, *, timeout_s: float) -> Output:
        """Wait for output, for its end, or for `timeout_s`. A program nobody reads from stands still when the
        pipes are full, it loses nothing."""
        ...

    async def wait(self) -> ExecResult:
        """Its end, with what was not read: head and tail. A cancelled wait leaves it running."""
        ...

    async def kill(self) -> None:
        """End it with all that it started; returns when it is gone. An ended one is fine."""
        ...


class Sandbox(Protocol):
    """One isolated place. Every method may be called by many coroutines at once.

    Each raises `Died` when the sandbox is gone, to every waiter, and never waits for ever.
    A cancelled call stops its program (a cancelled cell loses the session's state).
    """

    @property
    def id(self) -> str: ...

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
        """Run a command. `env` is all it sees besides PATH, HOME and LANG; stdin ends after the bytes."""
        ...

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        output_limit: int | None = None,
    ) -> Process:
        """Start a command and talk with it, for `timeout_s` or as long as the sandbox lives.

        At most `output_limit` bytes of stdout, and of stderr, are held for the reader.
        """
        ...

    async def python(self, code: str, *, session: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell in the interpreter named `session`; a last expression is echoed like a prompt does.

        At the deadline it is interrupted (state kept), a second later killed (`state_lost`).
        """
        ...

    async def end_session(self, session: str) -> None:
        """Stop the interpreter and all it started, and drop its files. Unknown names are fine."""
        ...

    async def read(self, path: str, *, max_bytes: int = 8 << 20) -> bytes:
        """A regular file of the sandbox's own writable folders; `FileError` for anything else."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file atomically, making its folders."""
        ...

    async def list_dir(self, path: str) -> list[FileEntry]:
        """What lies in a folder of its own writable ones, by name; `FileError` for anything else.

        A provider may refuse a folder of more than 10,000 entries in the same way: a program can read those.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """The writable files as they are now. Programs go on; `Unsupported` where a provider has none."""
        ...

    async def reset(self, *, to: Snapshot | None = None) -> None:
        """As new, or with the files of `to`: programs stopped, sessions forgotten, files dropped."""
        ...

    async def keepalive(self, ttl_s: float) -> None:
        """It lives for at least `ttl_s` seconds from now; Died when it does not live."""
        ...

    async def alive(self) -> bool:
        """Whether it answers now."""
        ...

    async def close(self) -> None:
        """Stop everything and leave nothing. Idempotent; runs to its end even if the caller is cancelled."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
